"""Prompts longer than allowed: measure all of them, drop them, refuse them, or cut them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence

import numpy as np

from verl.data.progress import track
from verl.errors import ConfigError

TRUNCATIONS = ("error", "left", "right", "middle")
CHUNK = 512


def check_truncation(how: str, allowed: Sequence[str] = TRUNCATIONS) -> str:
    """The name of a way to cut, or a `ConfigError`."""
    if how not in allowed:
        raise ConfigError("unknown truncation", key="data.truncation", got=how, allowed=allowed)
    return how


def truncate(ids: list[int], limit: int, how: str) -> list[int]:
    """At most ``limit`` ids: ``left`` keeps the end, ``right`` the beginning, ``middle`` both ends."""
    if len(ids) <= limit:
        return ids
    if how == "left":
        return ids[len(ids) - limit :]
    if how == "right":
        return ids[:limit]
    if how == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise ValueError(f"{len(ids)} ids are more than {limit}")


def measure(
    count: int, lengths_of: Callable[[range], Sequence[int]], *, workers: int = 1, description: str = "measuring"
) -> np.ndarray:
    """The length of each of ``count`` rows, in chunks, with a progress bar.

    Args:
        lengths_of: the lengths of the rows of a range; with several workers it runs in forked processes.
        workers: processes; tokenisers are parallel by themselves, so more than one pays only for many rows.
    """
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    if workers > 1 and len(chunks) > 2 and "fork" in multiprocessing.get_all_start_methods():
        found = _in_processes(chunks, lengths_of, min(workers, len(chunks)), description)
    else:
        found = [lengths_of(chunk) for chunk in track(chunks, description)]
    return np.asarray([length for lengths in found for length in lengths], dtype=np.int64)


_forked_job: Callable[[range], Sequence[int]] | None = None


def _run_forked(chunk: range) -> Sequence[int]:
    assert _forked_job is not None
    return _forked_job(chunk)


def _in_processes(
    chunks: list[range], job: Callable[[range], Sequence[int]], workers: int, description: str
) -> list[Sequence[int]]:
    # The job holds the whole table: forked processes see it through this global without a copy.
    global _forked_job
    _forked_job = job
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            return list(track(pool.imap(_run_forked, chunks), description, total=len(chunks)))
    finally:
        _forked_job = None
