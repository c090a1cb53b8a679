"""One event loop for the async methods of all local workers.

It lives in a thread of its own and stops with the program only, as the loop of a worker process would: tasks that a
method leaves behind continue between calls, objects of different workers share a loop, and a caller that is itself in a
loop (a notebook) works.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from verl.errors import WorkerError
from verl.outcomes import on_error

T = TypeVar("T")

END_SECONDS = 5.0
"""How long the end of the program waits for what the loop is in the middle of."""
_lock = threading.Lock()  # threads that call an async method first: two would start two loops
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="verl-local-loop", daemon=True)
            _thread.start()
        return _loop


def _end() -> None:
    """Stop the loop while the interpreter is whole: a thread that it cuts off in a kernel aborts the process."""
    if _loop is not None and _thread is not None and _thread.is_alive():
        asyncio.run_coroutine_threadsafe(_stop(_loop), _loop)
        _thread.join(END_SECONDS)


async def _stop(loop: asyncio.AbstractEventLoop) -> None:
    """Stop the loop after its asynchronous generators, which hold the connections of `verl.serving.client`."""
    await loop.shutdown_asyncgens()
    loop.stop()


atexit.register(_end)  # at import, so that what is registered later and ends earlier may still use the loop


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end on the shared loop and wait; an interrupt of the waiting thread cancels it.

    Raises:
        WorkerError: called from a coroutine on that loop, which would wait for itself.
    """
    loop = _running_loop()
    if threading.current_thread() is _thread:
        coroutine.close()
        raise WorkerError(
            "an async worker method was called through its group from inside another async worker method",
            fix="Use the group's handle: await group.handle(rank).call(Class.method, ...).",
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    with on_error(lambda _: future.cancel()):
        return future.result()
