"""Timers, memory logs and a profiler for code that places them itself; a run has its own (`profiler`).

Nothing in the library calls these forms.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from verl import device


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Add the seconds of the block to ``timing_raw[name]``; a trace that is being recorded shows the block."""
    start = time.perf_counter()
    with torch.profiler.record_function(name):
        yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start


simple_timer = marked_timer


def log_gpu_memory_usage(head: str, logger: Any = None, level: int = logging.DEBUG, rank: int | None = 0) -> None:
    """Log the memory in use, in GB; ``rank`` None does it on every rank, and without a logger it is printed."""
    if rank is None or not dist.is_initialized() or dist.get_rank() == rank:
        used = ", ".join(f"{key} {gb:.2f}" for key, gb in device.memory_now(device.resolve_device(None)).items())
        print(f"{head}, {used}") if logger is None else logger.log(level, f"{head}, {used}")


class GPUMemoryLogger:
    """Decorator: logs the memory in use before and after each call."""

    def __init__(self, role: str, logger: Any = None, level: int = logging.DEBUG, log_only_rank_0: bool = True):
        self.role, self.options = role, (logger, level, 0 if log_only_rank_0 else None)

    def __call__(self, fn: Any) -> Any:
        @functools.wraps(fn)
        def logged(*args: Any, **kwargs: Any) -> Any:
            log_gpu_memory_usage(f"Before {self.role} {fn.__name__}", *self.options)
            result = fn(*args, **kwargs)
            log_gpu_memory_usage(f"After {self.role} {fn.__name__}", *self.options)
            return result

        return logged


def gather_timing(timing_raw: dict[str, float]) -> dict[str, list[float]]:
    """The seconds of every rank under each name; every rank calls it, with the same names."""
    ranks: list[Any] = [timing_raw]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, timing_raw)  # all ranks, once per call
    return {name: [timing[name] for timing in ranks] for name in timing_raw}


_REDUCE: dict[Any, Callable[[list[float]], float]] = {
    dist.ReduceOp.AVG: lambda values: sum(values) / len(values), dist.ReduceOp.SUM: sum,
    dist.ReduceOp.MAX: max, dist.ReduceOp.MIN: min,
}  # fmt: skip


def reduce_timing(timing_raw: dict[str, float], reduce_op: Any = dist.ReduceOp.AVG) -> dict[str, float]:
    """One number of all ranks under each name, by default their mean; every rank calls it, with the same names."""
    return {name: _REDUCE[reduce_op](values) for name, values in gather_timing(timing_raw).items()}


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """Of the seconds of all ranks: the share of ranks above the slowest ``k`` percent, the smallest, the largest.

    Three times -1 where there is no process group. Every rank calls it.
    """
    if not dist.is_initialized():
        return -1.0, -1.0, -1.0
    values = torch.tensor(gather_timing({"": timing})[""])
    limit = torch.quantile(values, 1 - k / 100)
    return (values > limit).float().mean().item(), values.min().item(), values.max().item()


class DistProfiler:
    """Traces what happens between `start` and `stop` with torch's profiler; the trace is `profiler` afterwards.

    Args:
        rank: of this process.
        config: a section with ``enable``, ``all_ranks`` and ``ranks``; None: off.
    """

    def __init__(self, rank: int, config: Any = None, tool_config: Any = None, **kwargs: Any):
        self.rank, self.config = rank, config
        self.profiler: torch.profiler.profile | None = None

    def check_enable(self) -> bool:
        return bool(self.config and self.config.enable)

    def check_this_rank(self) -> bool:
        return self.check_enable() and bool(self.config.all_ranks or self.rank in (self.config.ranks or ()))

    def start(self, **kwargs: Any) -> None:
        if self.check_this_rank():
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def stop(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()

    @classmethod
    def annotate(cls, message: str | None = None, **kwargs: Any) -> Callable[[Any], Any]:
        """Decorator: the calls stand under ``message`` in a trace that is being recorded."""

        def wrap(fn: Any) -> Any:
            @functools.wraps(fn)
            def named(*args: Any, **options: Any) -> Any:
                with torch.profiler.record_function(message or fn.__name__):
                    return fn(*args, **options)

            return named

        return wrap


Profiler = DistProfiler


class DistProfilerExtension:
    """Adds `start_profile` and `stop_profile` of a profiler to a worker class, which may override them."""

    def __init__(self, profiler: DistProfiler):
        self.profiler = profiler

    def start_profile(self, **kwargs: Any) -> None:
        self.profiler.start(**kwargs)

    def stop_profile(self) -> None:
        self.profiler.stop()
