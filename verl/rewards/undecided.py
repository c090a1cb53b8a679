"""Answers of which a scorer cannot say in time whether they are right: they count as wrong, and results say why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_reasons: ContextVar[list[str] | None] = ContextVar("reasons", default=None)


def undecided(reason: str) -> None:
    """Say that the answer which is being scored could not be compared with the truth."""
    reasons = _reasons.get()
    if reasons is not None:
        reasons.append(reason)


@contextmanager
def collected() -> Iterator[list[str]]:
    """What is said within the block, in this thread or task."""
    reasons: list[str] = []
    token = _reasons.set(reasons)
    try:
        yield reasons
    finally:
        _reasons.reset(token)
