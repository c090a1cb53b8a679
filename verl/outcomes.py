"""What becomes of work that fails: it is undone where it stands, or handed to the thread that waits for it.

`on_error` and `settle` take every error, also a cancellation and an interrupt, and swallow none. The library does this
nowhere else: the rooms say only what is to be undone. `run_now` runs a coroutine from synchronous code, also where an
event loop is running.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def on_error(react: Callable[[BaseException], object]) -> Iterator[None]:
    """Call ``react`` with an error that leaves the block; the error passes on.

    Example:
        >>> with on_error(lambda _: process.close()):
        ...     wait_until_up(process)
    """
    try:
        yield
    except BaseException as error:  # a cancellation leaves as much to undo as a failure, and passes like one
        react(error)
        raise


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work and put its result, or its error, into the future."""
    try:
        result = work()
    except BaseException as error:  # carried to the thread that waits for the future
        future.set_exception(error)
    else:
        future.set_result(result)


def thread_outcome(work: Callable[[], T], name: str, daemon: bool = False) -> Future[T]:
    """Do the work in a thread of its own; its result or its error.

    Args:
        daemon: a program ends without waiting for it.
    """
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, work), name=name, daemon=daemon).start()
    return future


def take_error(work: asyncio.Future[Any]) -> None:
    """A callback for work whose error is reported elsewhere: asyncio shall not log it as never retrieved."""
    if not work.cancelled():
        work.exception()


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result; where this thread already runs an event loop (a notebook), another thread does the work meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return thread_outcome(lambda: asyncio.run(work), "verl-run-now").result()
