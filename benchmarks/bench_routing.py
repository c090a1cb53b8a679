"""A long-tailed batch over several replicas: requests routed to whoever has a slot, beside a static split of the rows.

    python benchmarks/bench_routing.py [--rounds 20] [--prompts 32] [--samples 16] [--replicas 4] [--slots 8]

The service is `verl.rollout.service.SamplerService`; the sampler's latency is simulated: a replica computes ``slots``
requests at once, first come first served, each takes its length times the time of a token, and nothing is computed. The
clock is simulated too, so that the seconds are those of the answers alone; what the service itself takes is printed.
Lengths are log-normal (median 200 tokens, at most 4096): hard prompts have long answers (sigma 1.0), and the samples of
a prompt differ (sigma 0.5). The split cuts the batch into equal runs of rows, as trainer ranks share a batch out. No
router is faster than the lower bound: the longest answer, or the time of all tokens over all slots if that is longer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Iterable, Sequence

import numpy as np
from figures import Figures, add_json

from verl.rollout.base import Completion, Request, Sampler, SamplingParams
from verl.rollout.service import SamplerService
from verl.trainer.planning.simulation import SimulatedClock

TOKEN_SECONDS = 1e-4


class Simulated(Sampler):
    """Takes the time that a request's budget says."""

    version = 0

    def __init__(self, slots: int):
        self._slots = asyncio.Semaphore(slots)

    async def generate(self, request: Request) -> Completion:
        async with self._slots:
            await asyncio.sleep(request.sampling.max_tokens * TOKEN_SECONDS)
        return Completion(request.id, (), (), "stop", ())

    async def update_weights(self, chunks: object, version: int) -> None:
        self.version = version

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        return 0

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}


def lengths(prompts: int, samples: int, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    drawn = generator.normal(np.log(200), 1.0, (prompts, 1)) + generator.normal(0, 0.5, (prompts, samples))
    return [int(length) for length in np.clip(np.exp(drawn), 1, 4096).ravel()]


async def seconds(work: Sequence[Awaitable[Completion]]) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await asyncio.gather(*work)
    return loop.time() - start


async def measured(wanted: Sequence[int], samples: int, replicas: int, slots: int) -> tuple[float, float, float]:
    """Simulated seconds routed and with a static split, and CPU seconds of the service."""
    requests = [
        Request(str(i), (1,), SamplingParams(max_tokens=n), uid=f"prompt {i // samples}", sample_index=i % samples)
        for i, n in enumerate(wanted)
    ]
    clock = asyncio.get_running_loop().time
    service = SamplerService({str(i): Simulated(slots) for i in range(replicas)}, slots=slots, clock=clock)
    start = time.process_time()
    routed = await seconds([service.generate(request) for request in requests])
    cpu = time.process_time() - start
    each = [Simulated(slots) for _ in range(replicas)]
    split = [each[i * replicas // len(requests)].generate(request) for i, request in enumerate(requests)]
    return routed, await seconds(split), cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 20), ("prompts", 32), ("samples", 16), ("replicas", 4), ("slots", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_json(parser)
    arguments = parser.parse_args()
    figures = Figures()
    replicas, slots = arguments.replicas, arguments.slots
    ratios, bounds, cpus = [], [], []
    print("| round | routed, s | static split, s | lower bound, s | routed / static | lower bound / static |")
    print("|---|---|---|---|---|---|")
    for seed in range(arguments.rounds):
        wanted = lengths(arguments.prompts, arguments.samples, seed)
        loop = SimulatedClock()
        routed, split, cpu = loop.run_until_complete(measured(wanted, arguments.samples, replicas, slots))
        loop.close()
        bound = max(*wanted, sum(wanted) / (replicas * slots)) * TOKEN_SECONDS
        ratios.append(routed / split)
        bounds.append(bound / split)
        cpus.append(cpu / len(wanted))
        print(f"| {seed} | {routed:.3f} | {split:.3f} | {bound:.3f} | {ratios[-1]:.2f} | {bounds[-1]:.2f} |")
    ratio, bound = statistics.median(ratios), statistics.median(bounds)
    print(f"\nmedian routed / static {ratio:.2f}, lower bound / static {bound:.2f}")
    print(f"CPU time per request {1e6 * statistics.median(cpus):.0f} µs, the simulated sampler's included")
    figures.add("a long-tailed batch", {"ratio": ratio, "lower_bound_ratio": bound})
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
