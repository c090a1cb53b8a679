"""One background task of a worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

from verl.outcomes import thread_outcome


class InBackground:
    """Runs a function in a thread; at most one at a time.

    Args:
        name: of the thread.

    Example:
        >>> writing = InBackground("writer")
        >>> writing.begin(write); writing.wait()
    """

    def __init__(self, name: str):
        self.name = name
        self._outcome: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start; the previous work must have ended (`wait`)."""
        assert self._outcome is None, "one piece of work at a time"
        self._outcome = thread_outcome(work, self.name)

    def wait(self) -> None:
        """Return once nothing runs; raises the work's error, once."""
        outcome = self._outcome
        if outcome is not None:
            wait([outcome])
            self._outcome = None
            outcome.result()
