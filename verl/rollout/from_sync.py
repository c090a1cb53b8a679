"""Runs coroutines from synchronous code, also where an event loop is already running; the only place that does so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result; where this thread already runs an event loop (a notebook), another thread does the work meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:  # carried over to the calling thread
            failure.append(error)

    thread = threading.Thread(target=target, name="verl-run-now")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
