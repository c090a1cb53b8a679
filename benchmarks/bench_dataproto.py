"""How fast `DataProto` moves rows, as ratios to the physical limit measured in the same run.

Run ``python benchmarks/bench_dataproto.py [--gigabytes 1.0] [--repeats 5]``. Each line takes the best of the repeats;
operation and reference alternate, so that a noisy machine hits both. The batch looks like a rollout: token columns in
int64, log-probs and masks, and one object column.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl import DataProto
from verl.device import set_threads

VIEW_LIMIT_SECONDS = 1e-3
CONCAT_RATIO = 0.9
ROWS, CHUNKS = 1024, 8


def make_batch(gigabytes: float) -> DataProto:
    """About this much tensor memory in 1024 rows and eight columns, every page touched."""
    width = int(gigabytes * 1e9 / ROWS / (4 * 8 + 4 * 4))
    tensors = {f"tokens_{i}": torch.randint(0, 1000, (ROWS, width)) for i in range(4)}
    tensors |= {f"floats_{i}": torch.rand(ROWS, width) for i in range(4)}
    return DataProto.from_dict(tensors, {"uid": [f"group {i // 8}" for i in range(ROWS)]})


def size_of(data: DataProto) -> int:
    return sum(tensor.nbytes for tensor in data.batch.values())


def fresh_copy(data: DataProto) -> list[torch.Tensor]:
    """The limit: the same bytes copied, column by column, into memory that was never touched."""
    return [torch.empty_like(tensor).copy_(tensor) for tensor in data.batch.values()]


def best(repeats: int, *functions: Callable[[], Any]) -> list[float]:
    """Best seconds of each function; they take turns, and what one made is freed before the next begins."""
    seconds = [float("inf")] * len(functions)
    for _ in range(repeats):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            result = function()
            seconds[index] = min(seconds[index], time.perf_counter() - start)
            del result
    return seconds


def send(data: DataProto) -> DataProto:
    buffers: list[Any] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(text, buffers=buffers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    threads = set_threads()
    data = make_batch(options.gigabytes)
    parts = data.chunk(CHUNKS)
    gigabytes = size_of(data) / 1e9
    order = torch.randperm(ROWS)
    print(f"{gigabytes:.2f} GB, {ROWS} rows, {len(data.batch.keys())} columns, {threads} threads")
    print(f"{'operation':<28}{'ms':>10}{'GB/s':>9}  {'reference':<24}{'ms':>10}{'ratio':>8}  goal")
    missed = 0

    def line(
        name: str, seconds: float, reference: str, limit: float, ratio: float, goal: str, holds: bool | None
    ) -> None:
        nonlocal missed
        missed += holds is False
        speed = f"{gigabytes / seconds:9.2f}" if seconds > VIEW_LIMIT_SECONDS else " " * 9
        mark = "" if holds is None else ("holds" if holds else "MISSED")
        print(f"{name:<28}{seconds * 1e3:10.3f}{speed}  {reference:<24}{limit * 1e3:10.3f}{ratio:8.2f}  {goal} {mark}")

    views: list[tuple[str, Callable[[], Any]]] = [
        (f"chunk({CHUNKS})", lambda: data.chunk(CHUNKS)),
        ("slice(100, 900)", lambda: data.slice(100, 900)),
        ("split(128)", lambda: data.split(128)),
        ("wire, out of band", lambda: send(data)),
    ]
    for name, function in views:
        [seconds] = best(max(20, options.repeats), function)
        held = seconds <= VIEW_LIMIT_SECONDS if name != "wire, out of band" else None
        goal = "< 1 ms" if held is not None else ""
        line(name, seconds, "1 ms", VIEW_LIMIT_SECONDS, seconds / VIEW_LIMIT_SECONDS, goal, held)
    copies: list[tuple[str, Callable[[], Any]]] = [
        (f"concat of {CHUNKS}", lambda: DataProto.concat(parts)),
        ("select_idxs (permutation)", lambda: data.select_idxs(order)),
        ("repeat(1)", lambda: data.repeat(1)),
    ]
    for name, function in copies:
        seconds, limit = best(options.repeats, function, lambda: fresh_copy(data))
        held = limit / seconds >= CONCAT_RATIO if name.startswith("concat") else None
        line(
            name, seconds, "copy into fresh memory", limit, limit / seconds, ">= 0.90" if held is not None else "", held
        )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
