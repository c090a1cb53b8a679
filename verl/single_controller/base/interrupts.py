"""How a thread of the controller is made to stop waiting for workers: what it waits for may have become pointless.

Consumes: nothing. Waits for: nothing; a runtime that waits for workers looks here a few times a second. Unblocked by:
`Interrupt.set` from any thread. The workers themselves continue their calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHECK_SECONDS = 0.2
"""How often a waiting thread looks whether it was interrupted."""


class Interrupted(BaseException):
    """Raised in the thread that was interrupted, where it waits for workers; no ``except Exception`` holds it."""


class Interrupt:
    """A request to one thread to stop waiting.

    Example:
        >>> with interruptible(interrupt): group.update_actor(batch)  # another thread may call interrupt.set()
    """

    def __init__(self) -> None:
        self._is_set = threading.Event()

    def set(self) -> None:
        """Request the interrupt; cannot be taken back."""
        self._is_set.set()

    @property
    def is_set(self) -> bool:
        """Whether it was requested."""
        return self._is_set.is_set()

    def check(self) -> None:
        """Raise `Interrupted` if it was requested."""
        if self._is_set.is_set():
            raise Interrupted


_of_thread = threading.local()


@contextmanager
def interruptible(by: Interrupt) -> Iterator[None]:
    """In this block this thread's calls of workers, and its waits for them, raise `Interrupted` once ``by`` is set."""
    before = current()
    _of_thread.interrupt = by
    try:
        yield
    finally:
        _of_thread.interrupt = before


def current() -> Interrupt | None:
    """What may interrupt this thread now."""
    return getattr(_of_thread, "interrupt", None)
