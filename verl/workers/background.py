"""One background task of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from verl.outcomes import settle


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
        self._thread: threading.Thread | None = None
        self._outcome: Future[None] = Future()

    def begin(self, work: Callable[[], None]) -> None:
        """Start; the previous work must have ended (`wait`)."""
        assert self._thread is None, "one piece of work at a time"
        self._outcome = Future()
        self._thread = threading.Thread(target=settle, args=(self._outcome, work), name=self.name)
        self._thread.start()

    def wait(self) -> None:
        """Return once nothing runs; raises the work's error, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._outcome.result()
