"""How a thread of the controller is made to stop waiting for workers: what it waits for may have become pointless.

Consumes: nothing. Waits for: nothing; a runtime that waits for workers looks here a few times a second. Unblocked by:
`Interrupt.set` from any thread. The workers themselves continue their calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

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


def side_by_side(
    ahead: Callable[[], A], here: Callable[[], B], waiting: AbstractContextManager[None] | None = None
) -> tuple[A, B]:
    """The results of two functions, one in a thread, the other in the thread that calls; none outlives the call.

    Both may call worker groups, whose calls are sent one at a time to all ranks of their processes. An error ends the
    other function where it waits for workers.

    Args:
        ahead: runs in a thread.
        here: runs in this thread; signals reach it.
        waiting: is entered while this thread waits for the other one.

    Raises:
        BaseException: the first error of the two, as it was raised.
    """
    stop_ahead, stop_here = Interrupt(), Interrupt()
    results: list[A] = []
    errors: list[BaseException] = []

    def run_ahead() -> None:
        try:
            with interruptible(stop_ahead):
                results.append(ahead())
        except Interrupted:
            return  # the error is this thread's caller's
        except BaseException as error:  # carried over to the calling thread
            errors.append(error)
            stop_here.set()

    thread = threading.Thread(target=run_ahead, name="verl-ahead", daemon=True)
    thread.start()
    try:
        with interruptible(stop_here):
            mine = here()
    except Interrupted:
        thread.join()
        raise errors[0] from None
    except BaseException:
        stop_ahead.set()
        thread.join()
        raise
    with waiting or nullcontext():
        thread.join()
    if errors:
        raise errors[0]
    return results[0], mine
