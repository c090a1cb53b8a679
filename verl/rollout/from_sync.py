"""Runs coroutines from synchronous code, also where an event loop is already running; the only place that does so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.outcomes import settle

T = TypeVar("T")


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result; where this thread already runs an event loop (a notebook), another thread does the work meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: Future[T] = Future()
    thread = threading.Thread(target=settle, args=(outcome, lambda: asyncio.run(work)), name="verl-run-now")
    thread.start()
    thread.join()
    return outcome.result()
