"""What all runners share: calls go in, futures of results come out, and a pool of threads that grows when needed."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

from verl.rewards.function import RewardFunction
from verl.rewards.invoke import invoke, raised
from verl.rewards.samples import RewardFailure, RewardResult, all_failed

Results = list[RewardResult]


class Runner(ABC):
    """Runs calls of one reward function. Safe to use from several threads."""

    @abstractmethod
    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        """One call of the function: one sample in the single form, all of them in a batch form.

        The future always gets results, never an exception; its time limit begins when the call begins.
        """

    def prepare(self) -> None:
        """Start what would start with the first call, and wait for it."""
        return None

    def close(self) -> None:
        """Give up what is running and free threads and processes."""
        return None


class InlineRunner(Runner):
    """In the caller's thread, without a time limit."""

    def __init__(self, function: RewardFunction):
        self.function = function

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        future: Future[Results] = Future()
        future.set_result(invoke(self.function, samples))
        return future


class Station(Protocol):
    """What one thread of a pool works with."""

    def handle(self, samples: Sequence[Any]) -> Results: ...

    def stop(self) -> None:
        """Called by any thread: end what is running. Must take no lock."""

    def close(self) -> None:
        """Called by the station's own thread when it ends."""


class Seat:
    """One thread of a pool, its station, and the call that it is at."""

    def __init__(self, station: Station):
        self.station = station
        self.thread: threading.Thread | None = None
        self.call: tuple[Sequence[Any], Future[Results]] | None = None
        self.started = 0.0
        self.given_up = False


class Pool:
    """Daemon threads that take calls from one queue; a thread is added when calls wait and none is free."""

    def __init__(self, make_station: Callable[[], Station], limit: int):
        self._make_station, self._limit = make_station, limit
        self._queue: SimpleQueue[tuple[Sequence[Any], Future[Results]] | None] = SimpleQueue()
        self._seats: set[Seat] = set()
        self._lock = threading.Lock()
        self._idle = 0
        self._unanswered = 0
        self._closed = False

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        future: Future[Results] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward function was closed")
            self._unanswered += 1
            self._queue.put((samples, future))
            self._grow()
        return future

    def busy(self) -> bool:
        """Whether a call runs, waits, or is on its way from the queue to a seat."""
        with self._lock:
            return self._unanswered > 0

    def give_up_overdue(self, timeout: float, results: Callable[[Sequence[Any]], Results]) -> list[Seat]:
        """Answer all calls that run longer than ``timeout``, replace their threads; returns the seats left behind."""
        now = time.monotonic()
        with self._lock:
            late = [seat for seat in self._seats if seat.call is not None and now - seat.started > timeout]
            answers = [seat.call for seat in late if seat.call is not None]
            for seat in late:
                seat.given_up = True
                self._seats.discard(seat)
                self._unanswered -= 1
            self._grow()
        for samples, future in answers:
            future.set_result(results(samples))
        return late

    def close(self) -> None:
        """End all threads. Takes no lock: the garbage collector may call it in a thread that holds one."""
        self._closed = True
        for _ in range(self._limit):
            self._queue.put(None)
        for seat in list(self._seats):
            seat.station.stop()

    def _grow(self) -> None:
        while len(self._seats) < self._limit and self._queue.qsize() > self._idle:
            seat = Seat(self._make_station())
            seat.thread = threading.Thread(target=self._work, args=(seat,), name="verl-reward", daemon=True)
            self._seats.add(seat)
            self._idle += 1
            seat.thread.start()

    def _work(self, seat: Seat) -> None:
        while (call := self._queue.get()) is not None:
            with self._lock:
                self._idle -= 1
                seat.call, seat.started = call, time.monotonic()
            try:
                results = seat.station.handle(call[0])
            except BaseException as error:  # boundary: whatever a thread meets, the caller must not wait for ever
                results = all_failed(call[0], raised(error))
            with self._lock:
                if seat.given_up:
                    return
                seat.call = None
                self._idle += 1
                self._unanswered -= 1
            call[1].set_result(results)
        seat.station.close()


def too_slow(timeout: float, what: str) -> RewardFailure:
    """The failure of a call that was stopped."""
    return RewardFailure("timeout", f"took longer than {timeout:g} s {what}")
