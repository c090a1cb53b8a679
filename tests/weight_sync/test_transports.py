"""Every transport brings the same bits; what one end does wrong, the other end hears of."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as processes

from tests.harness.samplers import largest_difference, prompt, requests, sample, tiny_model
from verl.errors import RolloutError
from verl.models import export_weights
from verl.ports import free_port
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import (
    BroadcastTransport,
    DeltaDecoder,
    DeltaEncoder,
    DeltaTransport,
    DiskTransport,
    SharedMemoryTransport,
    Transport,
    WeightChunk,
    chunk_weights,
    transport,
)
from verl.weight_sync.shared_memory import reserve
from verl.weight_sync.wire import ChunkLayout

WEIGHTS = {
    "a": torch.tensor([[float("nan"), -0.0, 1e-40], [float("inf"), 2.0, 3.0]]),
    "b": torch.arange(300, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.zeros(5, 0),
    "e": torch.arange(64.0 * 17).view(64, 17).t(),
}
BUCKET = 1024
STARTS = 300.0
"""Seconds in which a process has imported everything, on a busy machine, too."""


def stream(version: int = 1) -> Iterator[WeightChunk]:
    return chunk_weights(WEIGHTS.items(), BUCKET, version)


def taken(chunks: Iterator[WeightChunk]) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Versions of the chunks, and copies of the tensors."""
    versions, tensors = [], {}
    for chunk in chunks:
        versions.append(chunk.version)
        tensors.update({name: tensor.clone() for name, tensor in chunk.tensors})
    return versions, tensors


def check(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def in_thread(run: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Runs beside the test; the list gets the result or the error."""
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(run())
        except RolloutError as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, outcome


@pytest.fixture
def ring() -> Iterator[tuple[Transport, Transport]]:
    ours = SharedMemoryTransport(bucket_bytes=5000, timeout=60)
    theirs = SharedMemoryTransport(**json.loads(json.dumps(ours.address)), timeout=60)
    yield ours, theirs
    theirs.close()
    ours.close()
    assert not os.path.exists(ours.path)


def test_shared_memory_brings_every_bit_again_and_again(ring):
    ours, theirs = ring
    assert oct(os.stat(ours.path).st_mode)[-3:] == "600", "nobody else may read weights"
    for version in (1, 2, 3):
        thread, outcome = in_thread(lambda: ours.send(stream(version)))  # noqa: B023
        versions, found = taken(theirs.receive())
        thread.join(60)
        check(found)
        assert len(versions) > 1 and set(versions) == {version}
        assert outcome == [sum(t.nbytes for t in WEIGHTS.values())]


def _other_process(address: dict, results: str) -> None:
    torch.set_num_threads(1)
    theirs = SharedMemoryTransport(**address, timeout=STARTS)
    sampler = HFSampler(tiny_model())
    asyncio.run(sampler.update_weights(theirs.receive(), 4))
    theirs.close()
    torch.save(dict(sampler.model.state_dict()), results)


@pytest.mark.slow
def test_a_sampler_in_another_process_gets_the_weights_through_shared_memory(tmp_path):
    new = tiny_model(seed=1)
    ours = SharedMemoryTransport(bucket_bytes=20000, timeout=STARTS)
    worker = processes.get_context("spawn").Process(target=_other_process, args=(ours.address, str(tmp_path / "w.pt")))
    worker.start()
    ours.send(chunk_weights(export_weights(new), 9000, 4))
    worker.join(STARTS)
    ours.close()
    assert worker.exitcode == 0
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in new.state_dict().items())


def test_a_trainer_that_fails_half_way_is_heard_of_at_the_other_end(ring):
    ours, theirs = ring

    def broken() -> Iterator[WeightChunk]:
        yield next(stream())
        raise RolloutError("the trainer's own error")

    thread, outcome = in_thread(lambda: ours.send(broken()))
    sampler = HFSampler(tiny_model())
    with pytest.raises(RolloutError):
        asyncio.run(sampler.update_weights(theirs.receive(), 1))
    thread.join(60)
    assert "the trainer's own error" in str(outcome[0]) or "did not accept" in str(outcome[0])
    with pytest.raises(RolloutError, match="did not finish"):
        sample(sampler, requests([prompt(3, 1)]))


def test_a_sampler_that_refuses_is_heard_of_by_the_trainer(ring):
    ours, theirs = ring
    thread, outcome = in_thread(lambda: ours.send(stream()))
    sampler = HFSampler(tiny_model())
    with pytest.raises(RolloutError, match="no such weight"):
        asyncio.run(sampler.update_weights(theirs.receive(), 1))
    thread.join(60)
    assert not thread.is_alive() and "did not accept the weights" in str(outcome[0])


def test_nobody_at_the_other_end_is_an_error_after_the_timeout():
    ours = SharedMemoryTransport(bucket_bytes=5000, timeout=0.05)
    with pytest.raises(RolloutError, match="waited 0 s for the sampler"):
        ours.send(stream())
    ours.close()
    theirs = SharedMemoryTransport(bucket_bytes=5000, timeout=0.05)
    with pytest.raises(RolloutError, match="waited 0 s for the trainer"):
        next(theirs.receive())
    theirs.close()


def test_a_weight_larger_than_the_bucket_and_ends_that_disagree_are_named(ring):
    ours, _ = ring
    with pytest.raises(RolloutError, match=r"update_weights_bucket_megabytes.*larger than a bucket"):
        ours.send(chunk_weights([("large", torch.zeros(40000))], 1, 1))
    with pytest.raises(RolloutError, match="disagree on the bucket size"):
        SharedMemoryTransport(ours.path, bucket_bytes=64)


def test_memory_for_which_there_is_no_room_is_an_error_and_leaves_no_file(tmp_path):
    with pytest.raises(RolloutError, match=r"update_weights_bucket_megabytes.*no room.*shm-size"):
        SharedMemoryTransport(bucket_bytes=1 << 58)
    path = tmp_path / "segment"
    with open(path, "wb") as file, pytest.raises(RolloutError, match="no room"):
        reserve(file.fileno(), str(path), 1 << 60)
    assert not path.exists()


def test_whoever_waits_long_leaves_the_processor_to_others(monkeypatch):
    now, polls = 0.0, 0

    def goes_on(seconds: float = 1e-6) -> float:
        nonlocal now
        now += seconds
        return now

    def never() -> bool:
        nonlocal polls
        polls += 1
        return False

    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=goes_on, sleep=goes_on))
    with pytest.raises(RolloutError, match="waited 0 s for nobody"):
        DiskTransport("unused", timeout=0.2).wait_until(never, "nobody")
    assert 5 < polls < 300, "naps of a tenth of the time waited, of a ms at most"


@pytest.mark.parametrize("shape", ["[Infinity]", "[-1]", '"x"', "null"])
def test_a_header_that_makes_no_sense_is_refused(shape):
    with pytest.raises(RolloutError, match="a header of weights"):
        ChunkLayout.decode(f'{{"version": 1, "last": true, "tensors": [["a", "F32", {shape}, 0]]}}'.encode())


def test_disk_brings_every_bit_and_keeps_two_versions(tmp_path):
    ours = DiskTransport(tmp_path / "weights")
    for version in (1, 2, 3):
        ours.send(stream(version))
    versions, found = taken(DiskTransport(tmp_path / "weights", version=3).receive())
    check(found)
    assert set(versions) == {3}
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["version_2", "version_3"]


def test_a_half_written_or_damaged_version_on_disk_is_never_used(tmp_path):
    chunks = list(stream(5))
    with pytest.raises(RolloutError, match="interrupted"):
        DiskTransport(tmp_path).send(chunks[:-1])
    with pytest.raises(RolloutError, match="the trainer gave up"):
        taken(DiskTransport(tmp_path, version=5).receive())
    sorted((tmp_path / "version_5").glob("*.json"))[-1].unlink()  # as if it had been killed
    with pytest.raises(RolloutError, match="waited 0 s for version 5"):
        taken(DiskTransport(tmp_path, version=5, timeout=0.05).receive())
    DiskTransport(tmp_path, checksums=True).send(chunks)
    victim = sorted((tmp_path / "version_5").glob("*.bin"))[0]
    assert oct(victim.stat().st_mode)[-3:] == "600", "nobody else may read weights"
    data = bytearray(victim.read_bytes())
    data[8] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(RolloutError, match="checksum differs"):
        taken(DiskTransport(tmp_path, version=5).receive())
    DiskTransport(tmp_path).send(stream(6))
    last = sorted((tmp_path / "version_6").glob("*.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(RolloutError, match="cannot be read"):
        taken(DiskTransport(tmp_path, version=6).receive())


def test_a_reader_takes_the_first_part_from_disk_while_the_writer_makes_the_next(tmp_path):
    first_was_taken = threading.Event()

    def slow() -> Iterator[WeightChunk]:
        chunks = list(stream(1))
        yield chunks[0]
        assert first_was_taken.wait(60)
        yield from chunks[1:]

    thread, outcome = in_thread(lambda: DiskTransport(tmp_path).send(slow()))
    theirs = DiskTransport(tmp_path, version=1, timeout=60).receive()
    next(theirs)
    first_was_taken.set()
    taken(theirs)
    thread.join(60)
    assert outcome == [sum(t.nbytes for t in WEIGHTS.values())]


def test_weights_that_an_earlier_run_left_in_a_folder_are_not_mistaken_for_the_trainers_own(tmp_path):
    DiskTransport(tmp_path).send(chunk_weights([("b", torch.zeros(3))], BUCKET, 1))
    ours = DiskTransport.begin(BUCKET, folder=str(tmp_path), timeout=60)
    theirs = DiskTransport.reach(json.loads(json.dumps(ours.address)))
    theirs.expect(1)
    reader, outcome = in_thread(lambda: taken(theirs.receive()))
    reader.join(0.2)
    assert reader.is_alive(), "what lies there is of another writer"
    ours.send(stream(1))
    reader.join(60)
    check(outcome[0][1])


def test_files_of_old_versions_are_written_over_and_a_reader_that_is_too_slow_hears_of_it(tmp_path):
    ours = DiskTransport(tmp_path)
    ours.send(stream(1))
    slow = DiskTransport(tmp_path, version=1).receive()
    next(slow)
    first = {file.stat().st_ino for file in (tmp_path / "version_1").glob("*.bin")}
    ours.send(stream(2))
    ours.send(chunk_weights([*WEIGHTS.items()][:2], 1 << 20, 3))
    assert {file.stat().st_ino for file in (tmp_path / "version_3").glob("*.bin")} < first
    assert taken(DiskTransport(tmp_path, version=3).receive())[1].keys() == {"a", "b"}
    with pytest.raises(RolloutError, match="replaced while it was read"):
        list(slow)


def _rank(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    ours = BroadcastTransport.join(address, rank, 3, timeout=STARTS)
    if rank == 0:
        ours.send(stream(1))
        ours.send(stream(2))
        encoder = DeltaEncoder()
        ours.send(encoder.encode(stream(3)))
        ours.send(encoder.encode(stream(4)))
        return
    for version in (1, 2):
        versions, found = taken(ours.receive())
        check(found)
        assert set(versions) == {version}
    decoder = DeltaDecoder()
    for version in (3, 4):
        check(taken(decoder.decode(ours.receive()))[1])
        assert decoder.version == version
    with open(f"{folder}/{rank}", "w") as file:
        file.write("done")


@pytest.mark.slow
def test_a_broadcast_over_gloo_reaches_every_sampler(tmp_path):
    processes.spawn(_rank, args=(f"127.0.0.1:{free_port()}", str(tmp_path)), nprocs=3, join=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_broadcast_comes_whole_however_it_is_cut():
    weights = dict(WEIGHTS)
    weights["large"] = torch.randn(700, 1000)  # goes as it lies there, in parts
    weights["turned"] = torch.randn(300, 400).t()  # not contiguous
    weights |= {f"{'n' * 60}{number}": torch.full((1,), float(number)) for number in range(400)}  # a long header
    ours = BroadcastTransport.begin(0, timeout=60)
    theirs = BroadcastTransport.reach(json.loads(json.dumps(ours.address)))
    for version in (1, 2):
        weights["c"] = torch.tensor(version)
        chunks = chunk_weights(weights.items(), 1 << 30, version)
        thread, outcome = in_thread(lambda: ours.send(chunks))  # noqa: B023
        versions, arrived = taken(theirs.receive())
        thread.join(60)
        assert outcome == [sum(t.nbytes for t in weights.values())] and set(versions) == {version}
        assert arrived.keys() == weights.keys() and arrived["c"] == version
        check({**{name: arrived[name] for name in WEIGHTS}, "c": WEIGHTS["c"]})
        assert all(torch.equal(arrived[name], weights[name]) for name in weights.keys() - WEIGHTS.keys())

    def broken() -> Iterator[WeightChunk]:
        yield next(stream(3))
        raise RolloutError("the trainer's own error")

    thread, outcome = in_thread(lambda: ours.send(broken()))
    with pytest.raises(RolloutError, match="the trainer gave up"):
        taken(theirs.receive())
    thread.join(60)
    assert "the trainer's own error" in str(outcome[0])


def test_differences_travel_over_any_transport_into_a_sampler(ring):
    ours, theirs = ring
    wanted = requests([prompt(5, 1)], samples=3, max_tokens=8, ignore_eos=True)
    trainer, sampler = tiny_model(seed=1), HFSampler(tiny_model())
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    ours.close(), theirs.close()
    ours = SharedMemoryTransport(bucket_bytes=40000, timeout=60)
    theirs = SharedMemoryTransport(**ours.address, timeout=60)
    for version in (1, 2, 3):
        with torch.no_grad():
            trainer.model.layers[0].mlp.up_proj.weight[version].mul_(1.5)
        thread, _ = in_thread(lambda: ours.send(encoder.encode(chunk_weights(export_weights(trainer), 9000, version))))  # noqa: B023
        asyncio.run(sampler.update_weights(decoder.decode(theirs.receive()), version))
        thread.join(60)
        assert largest_difference(trainer, wanted, sample(sampler, wanted)) < 2e-5
    assert encoder.num_changed == 32
    theirs.close(), ours.close()


def test_a_bucket_of_differences_is_never_cut_whatever_its_size():
    weights = {name: torch.randn(600_000) for name in "abc"}
    ours = DeltaTransport.begin(32 << 20, timeout=60)
    theirs = DeltaTransport.reach(json.loads(json.dumps(ours.address)))
    for version in (1, 2, 3):
        weights["b"][version::7] += 1
        thread, outcome = in_thread(lambda: ours.send(chunk_weights(weights.items(), 1 << 30, version)))  # noqa: B023
        _, found = taken(theirs.receive())
        thread.join(60)
        assert isinstance(outcome[0], int), outcome
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert ours.encoder.ratio > 5
    theirs.close(), ours.close()
