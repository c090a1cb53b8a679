"""Weight synchronisation: how near to a plain copy whole weights come, and how few bytes differences take.

Whole weights (bf16) into a sampler's own tensors: in one process, and to another process over shared memory, over gloo
and over disk; each beside a copy of the same bytes into reused memory, interleaved in one run. A weight sync ends when
the receiver has everything where it keeps it. Differences are taken after true AdamW steps at learning rate 1e-6 on
float32 master weights, and are applied and compared bit by bit.

    python benchmarks/bench_weight_sync.py [--parameters 50] [--rounds 5] [--steps 3]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as processes

from verl.weight_sync import (
    BroadcastTransport,
    DeltaDecoder,
    DeltaEncoder,
    DiskTransport,
    SharedMemoryTransport,
    Transport,
    WeightChunk,
    WeightInventory,
    chunk_weights,
)
from verl.weight_sync.collective import Broadcast

BUCKET = 16 << 20
KINDS = ("same process", "shared memory", "gloo", "disk", "gloo, bytes", "disk, bytes")
"""The last two move the same bytes without anything around them: what gloo and the disk give at most."""
LIMITS = {"gloo": "gloo, bytes", "disk": "disk, bytes"}


@dataclass(frozen=True)
class Plan:
    """What both processes build: names and shapes of about ``millions`` million parameters."""

    millions: int

    def weights(self, fill: bool = True) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layers = max(1, self.millions // 2)
        found = {}
        for layer in range(layers):
            for name, shape in (("qkv", (768, 512)), ("out", (512, 512)), ("up", (1536, 512)), ("down", (512, 1024))):
                tensor = torch.empty(shape, dtype=torch.bfloat16)
                found[f"layers.{layer}.{name}.weight"] = tensor.normal_(std=0.02) if fill else tensor.zero_()
            found[f"layers.{layer}.norm.weight"] = torch.ones(512, dtype=torch.bfloat16)
        return found


def _receiver(kind: str, address: object, plan: Plan, rounds: int, ready: object) -> None:
    """A sampler's process; ``ready`` is released when it can receive, and after each weight sync."""
    torch.set_num_threads(1)
    inventory = WeightInventory(plan.weights(fill=False))
    theirs: Transport
    if kind == "shared memory":
        theirs = SharedMemoryTransport(**address)
    elif kind == "disk":
        theirs = DiskTransport.reach(address)
    else:
        theirs = BroadcastTransport.join(address, 1, 2)
    ready.release()
    for version in range(rounds):
        theirs.expect(version)
        inventory.receive(theirs.receive(), version)
        ready.release()


def _bare_receiver(place: str, num_bytes: int, rounds: int, ready: object) -> None:
    torch.set_num_threads(1)
    group = BroadcastTransport.join(place, 1, 2)
    ready.release()
    body = torch.empty(num_bytes, dtype=torch.uint8)
    for _ in range(rounds):
        broadcast(group, body)
        ready.release()


def _bare_reader(path: str, num_bytes: int, rounds: int, written: object, ready: object) -> None:
    target = memoryview(bytearray(num_bytes))
    ready.release()
    for _ in range(rounds):
        for start in range(0, num_bytes, BUCKET):
            written.acquire()
            with open(path, "rb", buffering=0) as file:
                file.seek(start)
                left = target[start : start + BUCKET]
                while left:
                    left = left[file.readinto(left) :]
        ready.release()


def broadcast(group: BroadcastTransport, body: torch.Tensor) -> None:
    """As fast as gloo goes: a MB at a time, four of them on their way."""
    under_way: deque[Broadcast] = deque()
    for piece in body.split(1 << 20):
        under_way.append(group._start(piece))
        if len(under_way) == 4:
            under_way.popleft().wait()
    for one in under_way:
        one.wait()


def write_bare(path: str, source: torch.Tensor, written: object) -> None:
    """Only the bytes: one file written over, as far as the page cache, and read by another process bucket by bucket."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as file:
        for bucket in source.split(BUCKET):
            left = memoryview(bucket.numpy())
            while left:
                left = left[file.write(left) :]
            written.release()


def free_place() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Ends:
    """The sending ends of all transports, with receivers at work."""

    def __init__(self, plan: Plan, rounds: int):
        self.plan, self.source = plan, plan.weights()
        self.version = dict.fromkeys(KINDS, 0)
        self.inventory = WeightInventory(plan.weights(fill=False))
        self.bytes = torch.ones(sum(t.nbytes for t in self.source.values()), dtype=torch.uint8)
        self.folder = tempfile.TemporaryDirectory()
        self.ring = SharedMemoryTransport(bucket_bytes=2 * BUCKET)
        self.disk = DiskTransport(self.folder.name)
        self.context = processes.get_context("spawn")
        self.workers, self.ready = [], {kind: self.context.Semaphore(0) for kind in KINDS}
        self.written, self.path = self.context.Semaphore(0), f"{self.folder.name}/bare"
        write_bare(self.path, self.bytes, self.context.Semaphore(0))
        place, bare_place, size = free_place(), free_place(), self.bytes.numel()
        self._start("shared memory", _receiver, "shared memory", self.ring.address, plan, rounds)
        self._start("disk", _receiver, "disk", self.disk.address, plan, rounds)
        self._start("disk, bytes", _bare_reader, self.path, size, rounds, self.written)
        self._start("gloo", _receiver, "gloo", place, plan, rounds)
        self.gloo = BroadcastTransport.join(place, 0, 2)
        self._start("gloo, bytes", _bare_receiver, bare_place, size, rounds)
        self.bare = BroadcastTransport.join(bare_place, 0, 2)
        for kind in KINDS[1:]:
            assert self.ready[kind].acquire(timeout=120), f"no receiver for {kind}"

    def _start(self, kind: str, target: Callable[..., None], *arguments: object) -> None:
        worker = self.context.Process(target=target, args=(*arguments, self.ready[kind]), daemon=True)
        worker.start()
        self.workers.append(worker)

    def run(self, kind: str) -> None:
        version = self.version[kind]
        self.version[kind] += 1
        stream = chunk_weights(self.source.items(), BUCKET, version)
        if kind == "same process":
            self.inventory.receive(stream, version)
            return
        if kind == "gloo, bytes":
            broadcast(self.bare, self.bytes)
        elif kind == "disk, bytes":
            write_bare(self.path, self.bytes, self.written)
        else:
            ends = {"shared memory": self.ring, "gloo": self.gloo, "disk": self.disk}
            ends[kind].send(stream)
        assert self.ready[kind].acquire(timeout=120), f"the receiver of {kind} is gone"

    def close(self) -> None:
        for worker in self.workers:
            worker.join(20)
        self.ring.close()
        self.folder.cleanup()


def whole(plan: Plan, rounds: int) -> None:
    ends = Ends(plan, rounds + 1)
    total = sum(t.nbytes for t in ends.source.values())
    target = torch.zeros(total, dtype=torch.uint8)
    source = torch.ones_like(target)
    kinds = list(ends.version)
    times: dict[str, list[float]] = {kind: [] for kind in (*kinds, "copy")}
    for number in range(rounds + 1):
        for kind in kinds:
            copied = timed(lambda: target.copy_(source))
            taken = timed(lambda: ends.run(kind))  # noqa: B023
            if number:
                times[kind].append(taken)
                times["copy"].append(copied)
    copy_time = statistics.median(times["copy"])
    print(f"whole weights, {total / 1e6:.0f} MB in buckets of {BUCKET >> 20} MB; a copy into reused memory: "
          f"{total / copy_time / 1e9:.1f} GB/s")  # fmt: skip
    for kind in kinds:
        seconds = statistics.median(times[kind])
        print(
            f"  {kind:14} {seconds * 1e3:8.1f} ms {total / seconds / 1e9:6.2f} GB/s "
            f"{copy_time / seconds:6.0%} of a copy"
            + (f", {statistics.median(times[LIMITS[kind]]) / seconds:.0%} of its limit" if kind in LIMITS else "")
        )
    ends.close()


def trained(plan: Plan, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Float32 master weights before and after AdamW steps whose gradients have the spread of real ones."""
    generator = torch.Generator().manual_seed(1)
    masters = {name: torch.nn.Parameter(t.float()) for name, t in plan.weights().items()}
    for master in masters.values():
        master.data.add_(torch.randn(master.shape, generator=generator) * 1e-5)
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-6, weight_decay=0.01)
    for _ in range(3):  # moments that are not those of the first step
        _step(masters, optimizer, generator)
    yield {name: master.detach() for name, master in masters.items()}
    for _ in range(steps):
        _step(masters, optimizer, generator)
        yield {name: master.detach() for name, master in masters.items()}


def _step(masters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    for master in masters.values():
        scale = torch.exp(torch.randn(master.shape, generator=generator) * 1.5)
        master.grad = torch.randn(master.shape, generator=generator) * scale * 1e-3
    optimizer.step()


def differences(plan: Plan, steps: int) -> None:
    encoder, decoder = DeltaEncoder(torch.bfloat16), DeltaDecoder()
    print("differences after AdamW steps at lr 1e-6, float32 masters, bf16 in the sampler")
    for version, weights in enumerate(trained(plan, steps)):
        start, cpu = time.perf_counter(), time.process_time()
        stream: list[WeightChunk] = list(encoder.encode(chunk_weights(weights.items(), 2 * BUCKET, version)))
        encoded, encoded_cpu = time.perf_counter() - start, time.process_time() - cpu
        start = time.perf_counter()
        found = {name: tensor for chunk in decoder.decode(stream) for name, tensor in chunk.tensors}
        decoded = time.perf_counter() - start
        exact = all(torch.equal(found[n].view(torch.int16), w.bfloat16().view(torch.int16)) for n, w in weights.items())
        scanned = encoder.num_bytes_whole / 1e9
        print(
            f"  update {version}: {encoder.num_changed / encoder.num_elements:7.3%} changed, "
            f"{encoder.num_bytes / 1e6:8.3f} of {encoder.num_bytes_whole / 1e6:.0f} MB: {encoder.ratio:6.1f} x fewer; "
            f"encode {scanned / encoded:.2f} GB/s ({scanned / encoded_cpu:.2f} per CPU-s), "
            f"decode {scanned / decoded:.2f} GB/s, {'exact' if exact else 'NOT EXACT'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=40, help="millions")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(args.parameters)
    whole(plan, args.rounds)
    differences(plan, args.steps)


if __name__ == "__main__":
    main()
