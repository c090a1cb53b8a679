"""Several processes in one gloo group, for tests: one group per world size runs all of its cells.

A cell is a function ``cell(ranks, folder) -> JSON value`` that every rank calls. Starting a group costs seconds, a
cell a fraction of one, so a module hands all of its cells to one group and its tests look at the results.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl.ports import free_port

Cell = Callable[[Any, Path], Any]
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "verl.protocol"]
TIMEOUT = 400.0
"""Seconds after which ranks are taken to hang, however busy the machine is."""


def run_cells(size: int, cells: Sequence[Cell], folder: Path) -> dict[str, list[Any]]:
    """Cell name -> what each rank returned, in rank order.

    Raises:
        AssertionError: a rank failed (with its traceback), or did not end in time (with the cell it was in).
    """
    context = multiprocessing.get_context("forkserver")  # one process imports torch, all others are forks of it
    context.set_forkserver_preload(PRELOADED)
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(target=_main, args=(rank, size, port, list(cells), folder), daemon=True)
        for port in [free_port()]
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    _wait(processes, folder, size)
    answers = [json.loads((folder / f"rank{rank}-of-{size}.json").read_text()) for rank in range(size)]
    return {cell.__name__: [answer[cell.__name__] for answer in answers] for cell in cells}


def _wait(processes: list[Any], folder: Path, size: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while any(process.is_alive() for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            time.sleep(0.5)  # the ranks that only lost their peer write their traceback too
            for process in processes:
                process.kill()
            break
        time.sleep(0.05)
    for process in processes:
        process.join()
    notes = [folder / f"rank{rank}-of-{size}.txt" for rank in range(size)]
    told = "\n".join(f"rank {rank}: {note.read_text()}" for rank, note in enumerate(notes) if note.exists())
    assert all(process.exitcode == 0 for process in processes), told


def _main(rank: int, size: int, port: int, cells: list[Cell], folder: Path) -> None:
    import torch

    from verl import distributed

    torch.set_num_threads(1)
    note = folder / f"rank{rank}-of-{size}.txt"
    answers, name = {}, "start"
    try:
        ranks = distributed.start(distributed.RankPlace(rank, size, rank, "127.0.0.1", port), timeout=TIMEOUT)
        for cell in cells:
            name = cell.__name__
            note.write_text(f"was in {name} when another rank ended")
            torch.manual_seed(rank)
            answers[name] = cell(ranks, folder)
            _end_groups()
        (folder / f"rank{rank}-of-{size}.json").write_text(json.dumps(answers))
        note.unlink(missing_ok=True)
        distributed.stop()
    except BaseException:
        note.write_text(f"failed in {name}\n{traceback.format_exc()}")
        raise SystemExit(1) from None


def _end_groups() -> None:
    """End the groups that a cell made. Collective.

    Each has threads that wake a hundred times a second; those of all cells were some thousand, and half of the time.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from verl.distributed import mesh

    if not dist.is_initialized():
        return
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    mesh.release_groups()
    mesh._group = None  # the next mesh is another one for torch's caches
