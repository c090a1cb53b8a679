"""Where a sampler lives and how weights get there; what goes wrong at either end is told as it is, and ends nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from glob import glob
from pathlib import Path

import pytest
import torch

from tests.harness.models import tiny_model_dir
from tests.harness.samplers import largest_difference, prompt, requests, sample, stopped_at_work, tiny_model
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.metrics import notices, reset_notices
from verl.models import export_weights, load_causal_lm
from verl.rollout import place
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.hosted import HostedSampler, WeightIntake
from verl.rollout.lost import EngineLostError
from verl.single_controller.local import LocalHandle
from verl.weight_sync import DiskTransport, SharedMemoryTransport, chunk_weights, shared_memory

BACKENDS = ("shared_memory", "disk", "delta", "gloo")


def rollout(backend: str, **options) -> RolloutConfig:
    found = RolloutConfig()
    engine = replace(found.checkpoint_engine, backend=backend, engine_kwargs=options)
    return replace(found, name="hf", checkpoint_engine=engine)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> HFModelConfig:
    return HFModelConfig(path=str(tiny_model_dir(tmp_path_factory.mktemp("model"))))


def hosted(model: HFModelConfig, backend: str, **options) -> HostedSampler:
    """Both ends in this process; the transport does not know."""
    host = WeightIntake(HFSampler(tiny_model()))
    chosen = place.transport_of(rollout(backend, timeout=60, **options), model, "cpu")
    return HostedSampler(LocalHandle(host), *chosen)


def update(sampler: HostedSampler, seed: int, version: int) -> torch.nn.Module:
    trainer = tiny_model(seed=seed)
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(trainer), 9000, version), version))
    return trainer


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_arrive_again_and_again(model, backend):
    sampler = hosted(model, backend)
    wanted = requests([prompt(5, 1)], samples=3, max_tokens=8, ignore_eos=True)
    for version in (1, 2, 3):
        trainer = update(sampler, seed=version, version=version)
        done = sample(sampler, wanted)
        assert largest_difference(trainer, wanted, done) < 2e-5
        assert {v for one in done for v in one.token_versions} == {version} == {sampler.version}
    assert sampler.stats()["weight_updates"] == 3 and sampler.stats()["weight_bytes_sent"] > 1e5
    sampler.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_sampler_refuses_is_told_in_its_words_and_the_next_update_is_taken(model, backend):
    sampler = hosted(model, backend)
    with pytest.raises(RolloutError, match="no such weight"):
        asyncio.run(sampler.update_weights(chunk_weights([("nonsense", torch.ones(3))] * 1, 9000, 1), 1))
    with pytest.raises(RolloutError, match="did not finish"):
        sample(sampler, requests([prompt(3, 1)]))
    update(sampler, seed=1, version=2)
    assert sample(sampler, requests([prompt(3, 1)]))[0].token_versions[0] == 2
    sampler.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_trainer_does_wrong_is_told_in_its_words_and_the_next_update_is_taken(model, backend):
    sampler = hosted(model, backend)
    if backend == "disk":  # nobody can tell a reader of files: it waits
        sampler._begin.keywords["timeout"] = 1

    def broken():
        yield next(chunk_weights(export_weights(tiny_model()), 9000, 1))
        raise RolloutError("the trainer's own error")

    with pytest.raises(RolloutError, match="the trainer's own error"):
        asyncio.run(sampler.update_weights(broken(), 1))
    if backend == "disk":
        sampler._begin.keywords["timeout"] = 60
    update(sampler, seed=1, version=2)
    assert sample(sampler, requests([prompt(3, 1)]))[0].token_versions[0] == 2
    sampler.close()


def test_shared_memory_has_no_name_any_more_once_both_ends_have_it(model, monkeypatch):
    monkeypatch.setattr(shared_memory, "PREFIX", f"{shared_memory.PREFIX}{os.getpid()}-")
    mine = f"/dev/shm/{shared_memory.PREFIX}"
    for backend in ("shared_memory", "delta"):
        sampler = hosted(model, backend)
        update(sampler, seed=1, version=1)
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if mine in line]
        assert mapped and all(line.endswith(" (deleted)") for line in mapped)
        assert not glob(f"{mine}*"), "a process that is killed now leaves nothing behind"
        update(sampler, seed=2, version=2)
        sampler.close()


@pytest.mark.slow
def test_a_sampler_in_a_process_of_its_own_that_is_killed_is_an_error_and_no_hang(model):
    sampler = place.place_sampler(rollout("shared_memory"), model, "cpu")
    weights = dict(export_weights(load_causal_lm(model.path, torch.float32)))
    asyncio.run(sampler.update_weights(chunk_weights(weights.items(), 9000, 1), 1))
    child = sampler._handle.process.process

    async def run():
        wanted = requests([prompt(3, 1)], samples=64, max_tokens=400, ignore_eos=True)
        tasks = await stopped_at_work(
            child.pid,
            ask=lambda: [asyncio.ensure_future(sampler.generate(request)) for request in wanted],
            owes=lambda tasks: not any(task.done() for task in tasks),
        )
        os.kill(child.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)

    found = asyncio.run(run())
    assert len(found) == 64 and all(isinstance(one, EngineLostError) for one in found), found
    with pytest.raises(EngineLostError, match="the sampler's process ended"):
        asyncio.run(sampler.update_weights(chunk_weights(weights.items(), 9000, 2), 2))
    sampler.close()


def test_names_of_upstream_and_this_machine_choose_the_transport(model, tmp_path):
    reset_notices()
    here = place.transport_of(rollout("shared_memory"), model, "cpu")[1]()
    assert isinstance(here, SharedMemoryTransport)
    here.close()
    assert place.transport_of(rollout("nccl"), model, "cpu")[0] == "gloo"
    assert any("broadcast over gloo" in text for text in notices().values())
    assert place.transport_of(rollout("nccl"), model, "cuda")[0] == "cuda_ipc"
    assert place.transport_of(rollout("nccl"), model, "cpu", is_separate=True)[0] == "gloo"
    assert place.transport_of(rollout("nccl"), model, "cuda", is_separate=True)[0] == "nccl"
    below = place.transport_of(rollout("delta_sharded", over="disk", folder=str(tmp_path)), model, "cpu")[1]()
    assert isinstance(below.over, DiskTransport) and below.encoder.dtype == torch.float32
    nested = place.transport_of(rollout("disk", disk={"folder": str(tmp_path), "checksums": True}), model, "cpu")[1]()
    assert nested.folder == tmp_path and nested.checksums
    reset_notices()


@pytest.mark.parametrize(
    ("backend", "options", "listens_on"),
    [
        ("gloo", {}, "127.0.0.2"),
        ("gloo", {"host": "127.0.0.3"}, "127.0.0.3"),
        ("delta", {"over": "gloo"}, "127.0.0.2"),
    ],
)
def test_between_machines_a_trainer_listens_on_its_own_address_unless_another_one_is_set(
    model, backend, options, listens_on
):
    _, begin = place.transport_of(rollout(backend, **options), model, "cpu", is_separate=True, host="127.0.0.2")
    end = begin()
    address = end.over.address if backend == "delta" else end.address
    assert address["place"].startswith(f"{listens_on}:")
    end.close()
    _, elsewhere = place.transport_of(rollout("disk"), model, "cpu", is_separate=True, host="127.0.0.2")
    assert "host" not in elsewhere.keywords


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("disk", {"foldr": "x"}, r"engine_kwargs\.foldr: the transport 'disk' has no such argument.*folder"),
        ("gloo", {"folder": "x"}, "no such argument"),
        ("cuda_ipc", {}, "needs a GPU"),
        ("smoke_signals", {}, "unknown transport of weights"),
    ],
)
def test_a_transport_or_an_argument_that_is_not_there_is_refused(model, backend, options, said):
    with pytest.raises(ConfigError, match=said):
        place.transport_of(rollout(backend, **options), model, "cpu")


def test_a_module_of_the_users_registers_a_transport(model, tmp_path):
    Path(tmp_path / "mine.py").write_text(
        "from verl.registry import TRANSPORTS\nfrom verl.weight_sync import DiskTransport\n\n\n"
        "@TRANSPORTS.register('carrier_pigeon')\nclass Pigeon(DiskTransport):\n    pass\n"
    )
    config = rollout("carrier_pigeon", folder=str(tmp_path / "loft"))
    engine = replace(config.checkpoint_engine, custom_backend_module=str(tmp_path / "mine.py"))
    _, begin = place.transport_of(replace(config, checkpoint_engine=engine), model, "cpu")
    assert type(begin()).__name__ == "Pigeon"
