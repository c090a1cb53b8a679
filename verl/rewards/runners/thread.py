"""Reward functions in threads of this process, given up when they take too long."""

from __future__ import annotations

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from verl.rewards.function import RewardFunction
from verl.rewards.gate import OPEN, CallGate
from verl.rewards.invoke import invoke
from verl.rewards.runners.base import Results, Runner, RunnerPool, too_slow
from verl.rewards.samples import RewardFailure, all_failed

TICK = 0.05


class _InThread:
    """An executor that calls the function where it stands."""

    most = 1

    def __init__(self, function: RewardFunction):
        self._function = function

    def prepare(self) -> None:
        return None

    def handle(self, calls: Sequence[Sequence[Any]], answer: Callable[[Results | RewardFailure], None]) -> None:
        for samples in calls:
            answer(invoke(self._function, samples))

    def stop(self) -> None:
        return None

    def close(self) -> None:
        return None


class ThreadRunner(Runner):
    """At most ``num_threads`` calls at once; each may take ``timeout`` seconds, None: as long as it likes."""

    def __init__(self, function: RewardFunction, timeout: float | None, num_threads: int, gate: CallGate = OPEN):
        self._pool = RunnerPool(lambda: _InThread(function), num_threads, timeout or math.inf, gate=gate)
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._timeout = timeout
        self._watched = False
        weakref.finalize(self, _close, self._pool, self._wake)

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        future = self._pool.submit(samples)
        if self._timeout is None:
            return future
        if not self._watched:
            self._watched = True
            watch = (self._pool, self._wake, self._timeout)
            threading.Thread(target=_watch, args=watch, name="verl-reward-watch", daemon=True).start()
        self._wake.put(True)
        return future

    def close(self) -> None:
        _close(self._pool, self._wake)


def _watch(pool: RunnerPool, wake: SimpleQueue[bool], timeout: float) -> None:
    """Give up calls that take too long. Sleeps while nothing runs, ends when the queue says False."""
    failure = too_slow(timeout, "and was given up; its thread is left to itself")
    while wake.get():
        while pool.busy():
            time.sleep(min(TICK, timeout / 4))
            for worker in pool.give_up_overdue(timeout, lambda samples: all_failed(samples, failure)):
                if worker.thread is not None and worker.thread.ident is not None:
                    interrupt(worker.thread.ident)


def interrupt(thread: int) -> None:
    """Raise SystemExit in a thread at its next Python instruction: an endless Python loop ends and costs no more."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def _close(pool: RunnerPool, wake: SimpleQueue[bool]) -> None:
    pool.close()
    wake.put(False)
