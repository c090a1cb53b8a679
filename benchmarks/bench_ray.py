"""What the single controller costs on Ray, beside bare Ray actors on the same cluster, in turn.

    OMP_NUM_THREADS=1 python benchmarks/bench_ray.py [--gigabytes 1] [--rounds 5] [--json result.json]

Calls: a registered method of a group against ``ray.get(actor.method.remote(...))`` of the same class as a plain actor,
for one worker, for two, and for a role that shares its process. Goal: at most 1.3 times.
Batches: a batch of float32 tensors split over two workers against Ray's own handling of the same tensors, cut for the
two actors beforehand (a slice would make Ray send the whole storage). Both sides read the first and last value of each
tensor. Goal: at least twice as fast. The copy speed of the memory is measured in the same run, as the limit.
Every round measures A B B A; the table gives the median and the range of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
import torch  # noqa: E402
from ray.util.serialization import deregister_serializer  # noqa: E402

from verl.protocol import DataProto  # noqa: E402
from verl.single_controller.base import ClassWithInitArgs, Dispatch, Worker, register  # noqa: E402
from verl.single_controller.ray import runtime, transfer  # noqa: E402
from verl.single_controller.ray.base import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

CALLS, TENSORS = 200, 8


def ends(tensors: dict[str, torch.Tensor]) -> float:
    """Reads a little of every tensor, so that it must have arrived."""
    return sum(float(tensor[0, 0] + tensor[-1, -1]) for tensor in tensors.values())


class Ours(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def add(self, value: int) -> int:
        return value + 1

    @register(Dispatch.DP_COMPUTE_METRIC)
    def look(self, data: DataProto) -> float:
        return ends(dict(data.batch.items()))


class Plain:
    def add(self, value: int) -> int:
        return value + 1

    def look(self, tensors: dict[str, torch.Tensor]) -> float:
        return ends(tensors)


def seconds(work: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int, times: int) -> dict[str, Any]:
    """Seconds of both and the ratio ours / theirs of every round."""
    seconds(ours, max(1, times // 4)), seconds(theirs, max(1, times // 4))
    mine, other = [], []
    for _ in range(rounds):
        first, second = seconds(ours, times), seconds(theirs, times)
        third, fourth = seconds(theirs, times), seconds(ours, times)
        mine.append((first + fourth) / 2)
        other.append((second + third) / 2)
    ratios = sorted(a / b for a, b in zip(mine, other))
    return {"ours": statistics.median(mine), "bare": statistics.median(other), "ratios": ratios}


def bench_calls(pool: RayResourcePool, actors: list[Any], rounds: int) -> dict[str, dict[str, Any]]:
    two = RayWorkerGroup(pool, RayClassWithInitArgs(Ours), name_prefix="two")
    roles = {"actor": ClassWithInitArgs(Ours), "critic": ClassWithInitArgs(Ours)}
    one = RayWorkerGroup(None, RayClassWithInitArgs(Ours), name_prefix="one")
    shared = RayWorkerGroup(None, create_colocated_worker_cls(roles), name_prefix="both").spawn({"actor"})["actor"]
    single = lambda: ray.get(actors[0].add.remote(1))  # noqa: E731
    found = {
        "call, 1 worker": compare(lambda: one.add(1), single, rounds, CALLS),
        "call, colocated role": compare(lambda: shared.add(1), single, rounds, CALLS),
        "call, 2 workers": compare(
            lambda: two.add(1), lambda: ray.get([actor.add.remote(1) for actor in actors]), rounds, CALLS
        ),
    }
    for group in (two, one, shared):
        group.close()
    return found


def bench_batch(pool: RayResourcePool, actors: list[Any], gigabytes: float, rounds: int) -> dict[str, Any]:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Ours), name_prefix="batch")
    columns = 1024
    rows = int(gigabytes * 1e9 / TENSORS / columns / 4) // 2 * 2
    tensors = {f"t{i}": torch.full((rows, columns), float(i)) for i in range(TENSORS)}
    batch = DataProto.from_dict(tensors=tensors)
    halves = [{key: value[part].clone() for key, value in tensors.items()} for part in _halves(rows)]

    def ours() -> list[float]:
        return group.look(batch)

    def theirs() -> list[float]:
        return ray.get([actor.look.remote(half) for actor, half in zip(actors, halves)])

    def bare() -> list[float]:
        """Without our way to send tensors, which holds for the whole process; taking it off costs microseconds."""
        deregister_serializer(torch.Tensor)
        try:
            return theirs()
        finally:
            transfer.install_transfer()

    assert ours() == bare() == theirs()
    found = compare(ours, bare, rounds, 1)
    group.close()
    size = sum(tensor.nbytes for tensor in tensors.values())
    target = torch.empty(rows, columns)
    target.copy_(tensors["t0"])
    copied = seconds(lambda: target.copy_(tensors["t1"]), 5)
    found["gb_per_s"] = {"ours": size / found["ours"] / 1e9, "bare": size / found["bare"] / 1e9}
    found["memcpy_gb_per_s"] = target.nbytes / copied / 1e9
    return found


def _halves(rows: int) -> list[slice]:
    return [slice(0, rows // 2), slice(rows // 2, rows)]


def show(name: str, found: dict[str, Any], goal: str, inverse: bool = False) -> None:
    ratios = sorted(1 / r for r in found["ratios"]) if inverse else found["ratios"]
    scale, unit = (1, "s ") if found["ours"] > 0.1 else (1e6, "us")
    print(
        f"{name:24s} ours {found['ours'] * scale:9.2f} {unit}  bare {found['bare'] * scale:9.2f} {unit}  "
        f"ratio {statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  goal {goal}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    store = int(options.gigabytes * 3e9) + (200 << 20)
    runtime.start_cluster([2], ray_init={"address": "local", "num_cpus": 2, "object_store_memory": store})
    try:
        pool = RayResourcePool([2])
        actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(2)]
        load = os.getloadavg()[0]
        calls = bench_calls(pool, actors, options.rounds)
        for name, found in calls.items():
            show(name, found, "<= 1.3")
        batch = bench_batch(pool, actors, options.gigabytes, options.rounds)
        show(f"batch of {options.gigabytes:g} GB", batch, ">= 2 (times as fast)", inverse=True)
        speeds = batch["gb_per_s"]
        print(
            f"batch: ours {speeds['ours']:.2f} GB/s, bare {speeds['bare']:.2f} GB/s, memcpy into used memory "
            f"{batch['memcpy_gb_per_s']:.2f} GB/s; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after"
        )
    finally:
        runtime.stop_cluster()
    if options.json:
        record = {"calls": calls, "batch": batch, "ray": ray.__version__, "torch": torch.__version__, "load": load}
        options.json.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
