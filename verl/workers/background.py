"""One background task of a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Start; the previous work must have ended (`wait`)."""
        assert self._thread is None, "one piece of work at a time"

        def run() -> None:
            try:
                work()
            except BaseException as error:  # carried over to `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name=self.name)
        self._thread.start()

    def wait(self) -> None:
        """Return once nothing runs; raises the work's error, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
