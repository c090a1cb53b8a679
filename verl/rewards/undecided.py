"""Answers of which a scorer cannot say in time whether they are right: they count as wrong, and results say why."""

from contextvars import ContextVar

REASONS: ContextVar[list[str]] = ContextVar("REASONS")  # of the call that this thread or task runs


def undecided(reason: str) -> None:
    """Say that the answer which is being scored could not be compared with the truth."""
    REASONS.get([]).append(reason)
