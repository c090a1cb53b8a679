"""Reward functions in threads of this process, given up when they take too long."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from verl.rewards.function import RewardFunction
from verl.rewards.invoke import invoke
from verl.rewards.runners.base import Pool, Results, Runner, too_slow
from verl.rewards.samples import all_failed

TICK = 0.05


class _Here:
    """A station that calls the function where it stands."""

    def __init__(self, function: RewardFunction):
        self._function = function

    def handle(self, samples: Sequence[Any]) -> Results:
        return invoke(self._function, samples)

    def close(self) -> None:
        return None


class ThreadRunner(Runner):
    """At most ``num_threads`` calls at once; each may take ``timeout`` seconds."""

    def __init__(self, function: RewardFunction, timeout: float, num_threads: int):
        self._pool = Pool(lambda: _Here(function), num_threads)
        self._work = threading.Event()
        self._watcher: threading.Thread | None = None
        self._timeout = timeout
        self._closed = threading.Event()
        weakref.finalize(self, _close, self._pool, self._work, self._closed)

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        future = self._pool.submit(samples)
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=_watch,
                args=(self._pool, self._work, self._closed, self._timeout),
                name="verl-reward-watch",
                daemon=True,
            )
            self._watcher.start()
        self._work.set()
        return future

    def close(self) -> None:
        _close(self._pool, self._work, self._closed)


def _watch(pool: Pool, work: threading.Event, closed: threading.Event, timeout: float) -> None:
    """Give up calls that take too long. Sleeps while nothing runs."""
    failure = too_slow(timeout, "and was given up; its thread is left to itself")
    while not closed.is_set():
        work.wait()
        work.clear()
        while pool.busy() and not closed.is_set():
            time.sleep(min(TICK, timeout / 4))
            for seat in pool.give_up_overdue(timeout, lambda samples: all_failed(samples, failure)):
                if seat.thread is not None and seat.thread.ident is not None:
                    _interrupt(seat.thread.ident)


def _interrupt(thread: int) -> None:
    """Raise SystemExit in a thread at its next Python instruction: an endless Python loop ends and costs no more."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def _close(pool: Pool, work: threading.Event, closed: threading.Event) -> None:
    closed.set()
    work.set()
    pool.close()
