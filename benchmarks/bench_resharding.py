"""From the training layout to the sampling layout: planned bytes, HybridFlow's closed form, and plans carried out.

    python benchmarks/bench_resharding.py [--write docs/appendix/resharding_table.md]

The first table plans a 64-layer model of 32B parameters on 16 ranks. The second carries plans out over gloo with 4 and
8 processes: bytes that the processes sent, bytes that passed the loopback interface (headers and acknowledgements
included, where Linux counts them), peak memory, and speed beside gloo's own all-gather of as many bytes, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl.ports import free_port
from verl.weight_sync.resharding import Layout, Plan, Resharder, closed_form, decoder, make_plan

LARGE = decoder(layers=64, hidden=5120, intermediate=27648, heads=40, key_value_heads=8, vocabulary=152064)
SMALL = decoder(layers=8, hidden=512, intermediate=2048, heads=16, key_value_heads=8, vocabulary=16384, itemsize=4)
ROUNDS = 5
HEADING = [
    "# Layout pairs: planned, closed form, executed",
    "",
    "Made by `python benchmarks/bench_resharding.py --write docs/appendix/resharding_table.md`; the columns:",
    "[resharding.md](../concepts/resharding.md). M: bytes of the model.",
    "",
]
EXECUTED: dict[int, list[tuple[Layout, Layout]]] = {
    4: [
        (Layout(2, 1, 2), Layout(1, 1, 4)),
        (Layout(4, 1, 1), Layout(2, 1, 2)),
        (Layout(2, 2, 1), Layout(1, 1, 4)),
        (Layout(2, 1, 2), Layout(4, 1, 1)),
    ],
    8: [
        (Layout(8, 1, 1), Layout(2, 1, 4)),
        (Layout(4, 2, 1), Layout(2, 1, 4)),
        (Layout(2, 2, 2), Layout(4, 1, 2)),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="also write both tables to this file")
    asked = parser.parse_args()
    lines = [*planned(), "", *executed()]
    print("\n".join(lines))
    if asked.write:
        asked.write.write_text("\n".join([*HEADING, *lines]) + "\n")


def planned() -> Iterator[str]:
    """Every pair of power-of-two layouts of 16 ranks, in shares of the model."""
    yield "| training | sampling | places | bytes on the wire | closed form | needed - owned | redundant | plan in ms |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for training, sampling in itertools.product(_layouts(16), _layouts(16)):
        start = time.perf_counter()
        plan = make_plan(LARGE, training, sampling)
        took = 1e3 * (time.perf_counter() - start)
        price, size = plan.price, LARGE.num_bytes
        nested = training.tensor % sampling.tensor == 0 and training.pipeline % sampling.pipeline == 0
        form = f"{training.world * closed_form(training, sampling):.3f} M" if nested else "-"
        least = int((price.needed - price.kept).sum())
        figures = f"{price.total / size:.3f} M | {form} | {least / size:.3f} M | {price.redundant.max() / size:.3f} M"
        yield f"| {training} | {sampling} | {plan.assignment} | {figures} | {took:.1f} |"


def executed() -> Iterator[str]:
    """Plans over gloo beside gloo's all-gather."""
    yield "| ranks | training | sampling | planned MB | sent MB | loopback MB | peak MB | limit MB | of all-gather |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    context = multiprocessing.get_context("spawn")
    for size in EXECUTED:
        queue, port = context.Queue(), free_port()
        workers = [context.Process(target=_work, args=(rank, size, port, queue)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for _ in EXECUTED[size]:
            yield queue.get(timeout=600)
        for worker in workers:
            worker.join()


def _work(rank: int, size: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    for training, sampling in EXECUTED[size]:
        line = _measure(rank, make_plan(SMALL, training, sampling))
        if rank == 0:
            queue.put(line)
    dist.destroy_process_group()


def _measure(rank: int, plan: Plan) -> str:
    entries = {name: entry for _, name, entry in plan.expanded()}
    shards = {}
    for name, entry in entries.items():
        if entry.source.index[rank] >= 0:
            low, high = entry.source.span(int(entry.source.index[rank]))
            shape = list(entry.weight.shape)
            shape[entry.source.axis] = high - low
            shards[name] = torch.randn(shape)
    bucket = 16 << 20
    resharder = Resharder(plan, rank, dtype=torch.float32, bucket_bytes=bucket)
    received = plan.price.received
    share = int(received.max()) // plan.sampling.world // 4 + 1
    ours, gathered = torch.randn(share), torch.empty(share * plan.sampling.world)
    seconds, theirs, passed = [], [], 0.0
    for _ in range(ROUNDS):  # in turns, so that other work on the machine hits both
        before = _loopback()
        seconds.append(_timed(lambda: [None for _ in resharder.run(shards.__getitem__)]))
        passed += (_loopback() - before) / ROUNDS
        theirs.append(_timed(lambda: dist.all_gather_single(gathered, ours)))
    sent = torch.tensor([resharder.sent_bytes / ROUNDS, resharder.peak_bytes, _layer(plan, rank) + bucket])
    total, most = sent.clone(), sent.clone()
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if plan.price.total:
        ours_speed = int(received.max()) / statistics.median(seconds)
        their_speed = share * (plan.sampling.world - 1) * 4 / statistics.median(theirs)
        ratio = f"{ours_speed / their_speed:.0%} ({ours_speed / 1e9:.2f} and {their_speed / 1e9:.2f} GB/s)"
    else:
        ratio = "nothing to send"
    return (
        f"| {plan.sampling.world} | {plan.training} | {plan.sampling} | {plan.price.total / 1e6:.1f} | "
        f"{float(total[0]) / 1e6:.1f} | {passed / 1e6:.1f} | {float(most[1]) / 1e6:.1f} | {float(most[2]) / 1e6:.1f} | "
        f"{ratio} |"
    )


def _timed(work: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def _layer(plan: Plan, rank: int) -> int:
    sizes: dict[object, int] = {}
    for layer, name, entry in plan.expanded():
        if entry.target.index[rank] >= 0:
            low, high = entry.target.span(int(entry.target.index[rank]))
            where = layer if layer >= 0 else name
            sizes[where] = sizes.get(where, 0) + entry.weight.num_bytes * (high - low) // entry.target.length
    return max(sizes.values())


def _loopback() -> int:
    """Bytes that the loopback interface has received; 0 where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), 0)


def _layouts(world: int) -> Iterator[Layout]:
    for tensor, pipeline in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        if world % (tensor * pipeline) == 0:
            yield Layout(tensor, pipeline, world // (tensor * pipeline))


if __name__ == "__main__":
    main()
