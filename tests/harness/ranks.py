"""Several processes in one gloo group, for tests: a group stays, and runs a cell when a test first looks at it.

A cell is a function ``cell(ranks, folder) -> JSON value`` that every rank calls. Starting a group costs seconds, a cell
a fraction of one; so the tests of a module share a group per world size, and only the cells of the tests that run cost
anything. A cell that fails ends its group and fails its own tests; the next cell starts another group.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from verl.ports import free_port

Cell = Callable[[Any, Path], Any]
PRELOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "datasets", "hydra", "pandas",
    "verl.protocol", "verl.trainer.sft_trainer",
]  # fmt: skip
"""Imported once, before any rank is forked: 0.8 instead of 3.5 processor seconds for a rank that trains two steps."""
TIMEOUT = 400.0
"""Seconds after which ranks are taken to hang in a cell, however busy the machine is."""
GRACE = 0.5
"""Seconds in which the ranks that only lost their peer report that, too."""


class Group:
    """The ranks of one gloo group, which call cells one after another.

    Args:
        size: ranks.
        folder: every cell is given it.
        keep_groups: whether the process groups that a cell made stay for the next one.
    """

    def __init__(self, size: int, folder: Path, keep_groups: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")  # one process imports torch, all others are forks of it
        context.set_forkserver_preload(PRELOADED)
        port, pipes = free_port(), [context.Pipe() for _ in range(size)]
        self.ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_main, args=(rank, size, port, theirs, folder, keep_groups), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that the end of a rank is seen as the end of its pipe

    def call(self, cell: Cell) -> list[Any]:
        """What each rank returned, in rank order.

        Raises:
            AssertionError: a rank failed (with its traceback), ended, or did not return in time.
        """
        answers, errors = {}, {}
        deadline = time.monotonic() + TIMEOUT
        for end in self.ends:
            end.send(cell)
        while len(answers) + len(errors) < len(self.ends) and (left := deadline - time.monotonic()) > 0:
            waiting = [end for rank, end in enumerate(self.ends) if rank not in answers and rank not in errors]
            for end in wait(waiting, left):
                rank = self.ends.index(end)
                answer, error = _received(end)
                (errors if error else answers)[rank] = error or answer
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE)
        if len(answers) < len(self.ends):
            self.kill()
            silent = "did not return" if errors else f"did not return within {TIMEOUT:.0f} s"
            notes = [
                f"rank {rank}: {errors.get(rank, silent)}" for rank in range(len(self.ends)) if rank not in answers
            ]
            raise AssertionError("\n".join([f"{cell.__name__} failed", *notes]))
        return [json.loads(answers[rank]) for rank in range(len(self.ends))]

    def close(self) -> None:
        """End the ranks, which stop their group first."""
        for end in self.ends:
            end.close()
        deadline = time.monotonic() + TIMEOUT
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _received(end: Connection) -> tuple[str | None, str | None]:
    """An answer as JSON, or an error."""
    try:
        return end.recv()
    except (EOFError, ConnectionError):
        return None, "ended without an answer"


Needs = dict[tuple[int, str], Sequence[tuple[int, str]]]


class Answers(dict[str, Any]):
    """Cell name -> what each rank returned; a cell runs when it is first looked at, on a group that is then started."""

    def __init__(self, cells: Sequence[Cell], start: Callable[[], Group], before: Callable[[str], None]) -> None:
        super().__init__()
        self.start, self.before = start, before
        self.cells = {cell.__name__: cell for cell in cells}
        assert len(self.cells) == len(cells), "two cells have the same name"
        self.group: Group | None = None

    def __missing__(self, name: str) -> Any:
        self.before(name)
        self.group = self.group or self.start()
        try:
            self[name] = self.group.call(self.cells[name])
        except BaseException:
            self.group.kill()
            self.group = None
            raise
        return self[name]

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


@contextmanager
def cells_on_demand(
    cells: Mapping[int, Sequence[Cell]], folder: Path, needs: Needs | None = None, keep_groups: bool = False
) -> Iterator[dict[int, Answers]]:
    """World size -> `Answers` of its cells, whose group ends with the block.

    Args:
        needs: (world size, cell name) -> the cells that have to run before it.
        keep_groups: as in `Group`.
    """

    def before(size: int, name: str) -> None:
        for other, earlier in (needs or {}).get((size, name), ()):
            answers[other][earlier]

    answers = {
        size: Answers(those, partial(Group, size, folder, keep_groups), partial(before, size))
        for size, those in cells.items()
    }
    try:
        yield answers
    finally:
        for one in answers.values():
            one.close()


def run_cells(size: int, cells: Sequence[Cell], folder: Path, keep_groups: bool = False) -> dict[str, list[Any]]:
    """Cell name -> what each rank returned, in rank order, of all cells in turn."""
    with cells_on_demand({size: cells}, folder, keep_groups=keep_groups) as answers:
        return {cell.__name__: answers[size][cell.__name__] for cell in cells}


def _main(rank: int, size: int, port: int, end: Connection, folder: Path, keep_groups: bool) -> None:
    import torch

    from verl import distributed

    torch.set_num_threads(1)
    ranks = None
    while True:
        try:
            cell = end.recv()
        except EOFError:
            break
        try:
            ranks = ranks or distributed.join_group(
                distributed.RankPlace(rank, size, rank, "127.0.0.1", port), timeout=TIMEOUT
            )
            torch.manual_seed(rank)
            answer = json.dumps(cell(ranks, folder))
            if not keep_groups:
                _end_groups()
        except BaseException:
            end.send((None, traceback.format_exc()))
            raise SystemExit(1) from None
        end.send((answer, None))
    if ranks is not None:
        distributed.leave_group()


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
