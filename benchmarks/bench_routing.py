"""A long-tailed batch over several replicas: requests routed to whoever has a seat, beside a static split of the rows.

    python benchmarks/bench_routing.py [--rounds 5] [--prompts 32] [--samples 16] [--replicas 4] [--seats 8]

The service is `verl.rollout.service.SamplerService`; the sampler's latency is simulated: a replica computes ``seats``
requests at once, first come first served, each takes its length times the time of a token, and nothing is computed.
Lengths are log-normal (median 200 tokens, at most 4096): hard prompts have long answers (sigma 1.0), and the samples of
a prompt differ (sigma 0.5). The split cuts the batch into equal runs of rows, as trainer ranks share a batch out.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Sequence

import numpy as np
from figures import Figures, add_json

from verl.rollout.base import Completion, Request, Sampler, SamplingParams
from verl.rollout.service import SamplerService

TOKEN_SECONDS = 1e-4


class Simulated(Sampler):
    """Takes the time that a request's budget says."""

    version = 0

    def __init__(self, seats: int):
        self._seats = asyncio.Semaphore(seats)

    async def generate(self, request: Request) -> Completion:
        async with self._seats:
            await asyncio.sleep(request.sampling.max_tokens * TOKEN_SECONDS)
        return Completion(request.id, (), (), "stop", ())

    async def update_weights(self, chunks: object, version: int) -> None:
        self.version = version

    async def abort(self, request_ids: object = None) -> int:
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
    start = time.perf_counter()
    await asyncio.gather(*work)
    return time.perf_counter() - start


async def measured(wanted: Sequence[int], replicas: int, seats: int) -> tuple[float, float]:
    """Seconds routed, and with a static split."""
    requests = [Request(str(i), (1,), SamplingParams(max_tokens=n)) for i, n in enumerate(wanted)]
    service = SamplerService({str(i): Simulated(seats) for i in range(replicas)}, seats=seats)
    routed = await seconds([service.generate(request) for request in requests])
    each = [Simulated(seats) for _ in range(replicas)]
    split = [each[i * replicas // len(requests)].generate(request) for i, request in enumerate(requests)]
    return routed, await seconds(split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("prompts", 32), ("samples", 16), ("replicas", 4), ("seats", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    add_json(parser)
    arguments = parser.parse_args()
    figures = Figures()
    found = [
        asyncio.run(measured(lengths(arguments.prompts, arguments.samples, seed), arguments.replicas, arguments.seats))
        for seed in range(arguments.rounds)
    ]
    ratios = [routed / split for routed, split in found]
    print("| round | routed, s | static split, s | ratio |\n|---|---|---|---|")
    for number, ((routed, split), ratio) in enumerate(zip(found, ratios)):
        print(f"| {number} | {routed:.3f} | {split:.3f} | {ratio:.2f} |")
    print(f"\nmedian ratio {statistics.median(ratios):.2f}")
    figures.add("a long-tailed batch", {"ratio": statistics.median(ratios)})
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
