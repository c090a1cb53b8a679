"""Splitting sequences over ranks: how far the heaviest is above the lower bound, and how long the search takes.

    python benchmarks/bench_balancing.py [--rounds 5]

Lengths are log-normal (median 512, at most 8192). The bound is the mean load, or the largest sequence with the smallest
company it can have. Time is CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from figures import Figures, add_json

from verl.algorithms.balancing import (
    calculate_workload,
    get_group_balanced_partitions,
    lower_bound,
    partition,
)

CASES = [(256, 8), (1024, 16), (2048, 64), (8192, 128)]


def lengths(count: int, sigma: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.clip(np.exp(generator.normal(np.log(512), sigma, count)).astype(np.int64), 1, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    add_json(parser)
    arguments = parser.parse_args()
    figures = Figures()
    print("| sequences, ranks | what | above the bound | CPU milliseconds |\n|---|---|---|---|")
    for count, ranks in CASES:
        for what in ("equal counts", "free counts", "groups of 8"):
            gaps, times = [], []
            for seed in range(arguments.rounds):
                size = lengths(count, 0.8, seed)
                work = calculate_workload(size)
                start = time.process_time()
                if what == "groups of 8":
                    groups = np.arange(count) // 8
                    parts = get_group_balanced_partitions(size, groups, ranks)
                    unit = work.reshape(-1, 8).sum(1)
                    bound = lower_bound(unit, ranks, equal_size=len(unit) % ranks == 0)
                else:
                    equal = what == "equal counts"
                    parts, bound = partition(work, ranks, equal), lower_bound(work, ranks, equal)
                times.append(time.process_time() - start)
                gaps.append(max(work[part].sum() for part in parts) / bound - 1)
            figures.add(
                f"{count}, {ranks}: {what}", {"above the bound": max(gaps), "ms": statistics.median(times) * 1e3}
            )
            print(f"| {count}, {ranks} | {what} | {max(gaps):.4%} | {statistics.median(times) * 1e3:.1f} |", flush=True)
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
