"""How long a weight update takes to reach a replica that is sampling, beside the transport's own time.

    python benchmarks/bench_weight_update.py [--hidden 1024] [--layers 6] [--rows 8] [--rounds 9]

A replica of the `hf` sampler in a process of its own gets float32 weights over shared memory. Three times, interleaved,
and their medians:

- transport: the same stream to a process that copies it into tensors of its own, and does nothing else;
- waits: to the replica without requests;
- samples: to the replica while ``--rows`` requests are in flight, which pause (``requests_at_update=pause``), from the
  beginning of the update until the replica has confirmed the version.

The goal is samples <= 1.2 x transport. Before the replica takes weights it leaves the forward pass that it is in, of
one token per row, at the next layer; how long a complete one takes is printed, too. Two cores at least, else the two
ends wait for each other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as processes
from figures import ROOT, Figures, add_json

sys.path.insert(0, str(ROOT))
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.config import ActorRolloutRefConfig, replace
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hosted import HostedSampler
from verl.rollout.place import transport_of
from verl.rollout.server.child import ChildHandle
from verl.weight_sync import SharedMemoryTransport, WeightInventory, chunk_weights

GOAL, TOKENS = 1.2, 4096


def receiver(address: dict[str, Any], folder: str, rounds: int, ready: Any) -> None:
    """The other end of the transport alone; ``ready`` is released when it can receive, and after each stream."""
    torch.set_num_threads(1)
    inventory = WeightInventory(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    end = SharedMemoryTransport(**address)
    ready.release()
    for version in range(1, rounds + 1):
        end.expect(version)
        inventory.receive(end.receive(), version)
        ready.release()


class Clock:
    """Seconds of each way, in turn.

    Args:
        weights: (name, tensor) of the model.
        bucket: bytes.
        requests: how many are in flight for ``samples``.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], bucket: int, requests: int):
        self.weights, self.bucket, self.requests = list(weights), bucket, requests
        self.seconds: dict[str, list[float]] = {"transport": [], "waits": [], "samples": [], "forward pass": []}

    def stream(self, version: int) -> Any:
        return chunk_weights(iter(self.weights), self.bucket, version=version)

    def transport(self, ring: SharedMemoryTransport, ready: Any, version: int) -> None:
        start = time.perf_counter()
        ring.send(self.stream(version))
        assert ready.acquire(timeout=120), "the receiver is gone"
        self.seconds["transport"].append(time.perf_counter() - start)

    async def replica(self, sampler: HostedSampler, version: int, name: str) -> None:
        start = time.perf_counter()
        await sampler.update_weights(self.stream(version), version)
        self.seconds[name].append(time.perf_counter() - start)

    async def busy_replica(self, sampler: HostedSampler, version: int) -> None:
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        work = [
            asyncio.ensure_future(sampler.generate(Request(f"{version}:{row}", (5, 6, 7, row + 8), sampling)))
            for row in range(self.requests)
        ]
        begun = await self._drawn(sampler, at_least=1)
        await asyncio.sleep(0.3)
        steps = (await self._drawn(sampler)) - begun
        self.seconds["forward pass"].append(0.3 / max(1, steps))
        await self.replica(sampler, version, "samples")
        assert not any(task.done() for task in work), "the requests ended before the update; ask for more tokens"
        await sampler.abort()
        await asyncio.gather(*work)

    async def _drawn(self, sampler: HostedSampler, at_least: int = 0) -> float:
        before = sampler.stats()["steps"]
        while True:
            await sampler.confirm(sampler.version)
            if sampler.stats()["steps"] >= before + at_least:
                return sampler.stats()["steps"]
            await asyncio.sleep(0.01)


async def measure(clock: Clock, sampler: HostedSampler, ring: SharedMemoryTransport, ready: Any, rounds: int) -> None:
    """One round to warm up, then those that count."""
    version = 0
    for number in range(1, rounds + 2):
        await asyncio.to_thread(clock.transport, ring, ready, number)
        version += 1
        await clock.replica(sampler, version, "waits")
        version += 1
        await clock.busy_replica(sampler, version)
        if number == 1:
            for seconds in clock.seconds.values():
                seconds.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("hidden", 1024), ("layers", 6), ("rows", 8), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    add_json(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = Qwen2Config(vocab_size=4096, hidden_size=asked.hidden, intermediate_size=3 * asked.hidden,
                            num_hidden_layers=asked.layers, num_attention_heads=8, num_key_value_heads=8,
                            max_position_embeddings=2 * TOKENS, tie_word_embeddings=False)  # fmt: skip
        model = Qwen2ForCausalLM(shape)
        model.save_pretrained(folder)
        changes = {"rollout.requests_at_update": "pause", "rollout.checkpoint_engine.backend": "shared_memory"}
        policy = replace(ActorRolloutRefConfig(), **changes, **{"rollout.name": "hf", "model.path": str(folder)})
        kind, begin = transport_of(policy.rollout, policy.model, "cpu")
        bucket = policy.rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
        clock = Clock(model.state_dict().items(), bucket, asked.rows)
        context = processes.get_context("spawn")
        ready, ring = context.Semaphore(0), begin()
        other = context.Process(target=receiver, args=(ring.address, str(folder), asked.rounds + 1, ready), daemon=True)
        other.start()
        assert ready.acquire(timeout=120), "the receiver did not come up"
        sampler = HostedSampler(ChildHandle(policy.rollout, policy.model, "cpu", kind), kind, begin)
        try:
            asyncio.run(measure(clock, sampler, ring, ready, asked.rounds))
        finally:
            sampler.close()
            other.join(10)
            ring.close()
    report(clock, asked)


def report(clock: Clock, asked: argparse.Namespace) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in clock.seconds.items()}
    size = sum(tensor.nbytes for _, tensor in clock.weights)
    print(f"{size / 1e6:.0f} MB over shared memory, {asked.rows} requests in flight, medians of {asked.rounds}:")
    for name, seconds in medians.items():
        print(f"  {name:12} {seconds * 1e3:8.1f} ms  {seconds / medians['transport']:5.2f} x the transport")
    ratio = medians["samples"] / medians["transport"]
    print(f"goal {GOAL} x: {'met' if ratio <= GOAL else 'missed'}; load of the machine: {os.getloadavg()[0]:.1f}")
    figures = Figures()
    figures.add(f"{size / 1e6:.0f} MB", {f"{name}, ms": seconds * 1e3 for name, seconds in medians.items()})
    figures.add("ratio", {"samples / transport": ratio})
    figures.write(asked.json)


if __name__ == "__main__":
    main()
