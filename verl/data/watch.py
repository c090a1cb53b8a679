"""A watchdog for work over its limits: a chat template that loops on a word of the data, or fills the memory.

One thread per process looks at all such work. It raises an exception in the working thread, which arrives at that
thread's next Python instruction; work that hangs inside a C function is not ended by it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")
TICK = 0.1


class DeadlineExceeded(Exception):
    """The work was ended."""


class _Stop(BaseException):
    """Goes past `except Exception` in what is ended."""


@dataclass(eq=False)
class _Work:
    thread: int
    clock: int | None
    deadline: float
    stopped: bool = False

    def is_late(self) -> bool:
        return _now(self.clock) > self.deadline


class _Watch:
    """Looks at the work of all threads of this process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over, as in a child process, which inherits no thread."""
        # Threads that begin or end work, and the one that looks at it; held for a change of the set only.
        self._lock, self._some = threading.Lock(), threading.Event()
        self._work: set[_Work] = set()
        self._thread: threading.Thread | None = None

    def add(self, work: _Work) -> None:
        with self._lock:
            self._work.add(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="verl-watch", daemon=True)
                self._thread.start()
        self._some.set()

    def remove(self, work: _Work) -> None:
        with self._lock:
            self._work.discard(work)

    def _look(self) -> None:
        while self._some.wait():
            time.sleep(TICK)
            with self._lock:
                for work in [work for work in self._work if work.is_late()]:
                    self._work.discard(work)
                    work.stopped = True
                    stop = ctypes.py_object(_Stop)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(work.thread), stop)
                if not self._work:
                    self._some.clear()


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.reset)


def within(seconds: float, function: Callable[[], T]) -> T:
    """The function's result.

    Args:
        seconds: of processor time of this thread; where the system does not tell it, of the clock.

    Raises:
        DeadlineExceeded: it took longer and was ended.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident()) if hasattr(time, "pthread_getcpuclockid") else None
    work = _Work(threading.get_ident(), clock, _now(clock) + seconds)
    try:
        try:
            _WATCH.add(work)
            result = function()
        finally:
            _WATCH.remove(work)
        while work.stopped:  # it ended in the same moment: the exception must arrive here and not later
            time.sleep(0)
    except _Stop:
        raise DeadlineExceeded from None
    return result


@contextmanager
def headroom(size: int) -> Iterator[None]:
    """At most ``size`` bytes more of address space for this process within the block: beyond them a MemoryError.

    The limit holds for all threads, so it is for moments in which no other one allocates much. Linux enforces it.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([psutil.Process().memory_info().vms + size, *limits]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _now(clock: int | None) -> float:
    return time.monotonic() if clock is None else time.clock_gettime(clock)
