"""Prompts longer than allowed: measure all of them, drop them, refuse them, or cut them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence

import numpy as np

from verl.data.progress import track
from verl.errors import ConfigError

TRUNCATIONS = ("error", "left", "right", "middle")
CHUNK = 512
PART = 100_000
"""Characters of a text up to which all of it is tokenised; that of 20 MB takes a minute and gigabytes."""
MARGIN = 100
MANY = 2**62
"""The length of a text that was not tokenised to its end."""
EncodeMany = Callable[[Sequence[str]], list[list[int]]]


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


def count_tokens(texts: Sequence[str], limit: int, encode_many: EncodeMany) -> list[int]:
    """Tokens of each text; `MANY` for one of megabytes whose beginning shows that it has far more than ``limit``.

    A cut changes the last tokens of a prefix, but fewer than the margin here. A prefix of few tokens (of one word,
    say) is doubled until it is the full text.
    """
    counts = [0] * len(texts)
    short = [n for n, text in enumerate(texts) if len(text) <= PART]
    for n, ids in zip(short, encode_many([texts[n] for n in short])):
        counts[n] = len(ids)
    for n, text in enumerate(texts):
        if len(text) > PART:
            ids, is_complete = _enough(text, limit, encode_many, from_end=False)
            counts[n] = len(ids) if is_complete else MANY
    return counts


def cut_tokens(text: str, limit: int, how: str, encode_many: EncodeMany) -> list[int]:
    """The ids of a text, cut to ``limit`` as `truncate` does; of megabytes only what is kept is tokenised."""
    if len(text) <= PART or how == "error":
        return truncate(encode_many([text])[0], limit, how)
    ids: list[int] = []
    for from_end in (False, True):
        if how in (("right", "middle"), ("left", "middle"))[from_end]:
            part, is_complete = _enough(text, limit, encode_many, from_end)
            if is_complete:
                return truncate(part, limit, how)
            ids = ids + part
    return truncate(ids, limit, how)


def _enough(text: str, limit: int, encode_many: EncodeMany, from_end: bool) -> tuple[list[int], bool]:
    """The ids of a part of a text that has far more than ``limit``, or of all of it; and whether it is all."""
    size = PART
    while size < len(text):
        (ids,) = encode_many([text[-size:] if from_end else text[:size]])
        if len(ids) > 2 * limit + MARGIN:
            return ids, False
        size *= 2
    return encode_many([text])[0], True


def length_text(length: int, limit: int) -> str:
    """A length for a message."""
    return f"more than {2 * limit}" if length == MANY else str(length)


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
        parts = _in_processes(chunks, lengths_of, min(workers, len(chunks)), description)
    else:
        parts = [lengths_of(chunk) for chunk in track(chunks, description)]
    return np.asarray([length for lengths in parts for length in lengths], dtype=np.int64)


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
