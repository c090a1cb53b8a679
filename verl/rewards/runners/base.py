"""What all runners share: calls go in, futures of results come out, and a pool of threads that grows when needed."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

from verl.rewards.function import RewardFunction
from verl.rewards.gate import OPEN, CallGate, CallPlace
from verl.rewards.invoke import invoke, raised
from verl.rewards.samples import RewardFailure, RewardResult, all_failed

PATIENCE = 1.0
"""Seconds that a call behind one that ran out of its time may run before those that wait get threads of their own."""
MOST_HANGING = 16
"""Threads of a pool whose calls run out of their time one after the other, and after how many in a row it gives up.

It also gives up after as many in a row that ended their process, since the next process has to start first.
"""

Results = list[RewardResult]
Call = tuple[Sequence[Any], Future[Results]]


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

    def __init__(self, function: RewardFunction, gate: CallGate = OPEN):
        self.function, self.gate = function, gate

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        future: Future[Results] = Future()
        future.set_result(self.call(samples))
        return future

    def call(self, samples: Sequence[Any]) -> Results:
        """The results of one call; a future for each would cost more than a quick function."""
        if self.gate.is_open:
            return invoke(self.function, samples)
        with self.gate.passed():
            return invoke(self.function, samples)


class CallExecutor(Protocol):
    """What one thread of a pool works with."""

    @property
    def most(self) -> int:
        """How many calls it wants at once; one, unless all of them are sure to be quick."""

    def prepare(self) -> None:
        """Start what calls need, so that it is not one of them that waits for it."""

    def handle(self, calls: Sequence[Sequence[Any]], answer: Callable[[Results | RewardFailure], None]) -> None:
        """Run calls in order and answer each as soon as it is done, the first in any case.

        Calls that it leaves unanswered wait for a thread again.
        """

    def stop(self) -> None:
        """Called by any thread: end what is running. Must take no lock."""

    def close(self) -> None:
        """Called by the executor's own thread when it ends."""


class PoolThread:
    """One thread of a pool, its executor, and the calls that it took: it is at the first one since ``started``."""

    def __init__(self, executor: CallExecutor):
        self.executor = executor
        self.thread: threading.Thread | None = None
        self.calls: deque[Call] = deque()
        self.started = math.inf
        self.place: CallPlace | None = None
        self.given_up = False


class RunnerPool:
    """Daemon threads that take calls from one queue; a thread is added when calls wait and none is free.

    An executor that wants several calls gets a part of those that wait, a smaller one the fewer they are, so that all
    threads are done at about the same time (guided self-scheduling, Polychronopoulos and Kuck 1987).

    Calls of a function that hangs run out of their time together, not one after the other: once one did and the next
    one is not quick either, those that wait get threads beyond the limit; a call that hangs there blocks its thread.
    When `MOST_HANGING` in a row ran out of their time, or ended their process, those that wait fail with them. An
    answer ends all that.

    Args:
        limit: most threads.
        timeout: seconds of a call, as far as the pool has to know.
        gives_up: False where the text of a call decides how long it takes, so that one which runs out of its time says
            nothing about the next one: nothing of the above is then done.
        gate: says when each call may begin; its time starts there.
    """

    def __init__(
        self,
        make_executor: Callable[[], CallExecutor],
        limit: int,
        timeout: float = math.inf,
        gives_up: bool = True,
        gate: CallGate = OPEN,
    ):
        self._gate = gate
        self._make_executor, self._limit, self._usual_limit = make_executor, limit, limit
        self._gives_up = gives_up
        self._patience, self._hung, self._died, self._relieved = min(PATIENCE, timeout / 4), 0, 0, False
        self._waiting: deque[Call] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()  # rings at least once for each call that waits
        self._threads: set[PoolThread] = set()
        # Submitters, the pool's threads, and `close`; held for a change of the fields below, never while waiting.
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
            self._waiting.append((samples, future))
            self._bell.put(None)
            self._grow()
        return future

    def busy(self) -> bool:
        """Whether a call runs or waits."""
        with self._lock:
            return self._unanswered > 0

    def give_up_overdue(self, timeout: float, results: Callable[[Sequence[Any]], Results]) -> list[PoolThread]:
        """Answer all calls that run longer than ``timeout``, replace their threads; returns the threads left behind.

        Also gives threads to calls that wait behind others that hang.
        """
        now = time.monotonic()
        with self._lock:
            late = [worker for worker in self._threads if worker.calls and now - worker.started > timeout]
            answers = [worker.calls.popleft() for worker in late]
            for worker in late:
                worker.given_up = True
                if worker.place is not None:
                    worker.place.free()
                self._threads.discard(worker)
                self._unanswered -= 1
                self._put_back(worker)
            for _ in late:
                answers += self._note_hanging()
            self._grow()
        for samples, future in answers:
            answer(future, results(samples))
        self.relieve()
        return late

    def relieve(self) -> None:
        """Threads for the calls that wait behind others that hang; executors call it while they wait for an answer."""
        now = time.monotonic()
        with self._lock:
            slow = any(worker.calls and now - worker.started > self._patience for worker in self._threads)
            if slow and self._hung and self._waiting and not self._relieved:
                self._relieved, self._limit = True, max(self._usual_limit, MOST_HANGING)
                self._grow()

    def close(self) -> None:
        """End all threads. Takes no lock: the garbage collector may call it in a thread that holds one."""
        self._closed = True
        self._bell.put(None)
        for worker in list(self._threads):
            worker.executor.stop()

    def _grow(self) -> None:
        while len(self._threads) < self._limit and len(self._waiting) > self._idle:
            worker = PoolThread(self._make_executor())
            worker.thread = threading.Thread(target=self._work, args=(worker,), name="verl-reward", daemon=True)
            self._threads.add(worker)
            self._idle += 1
            worker.thread.start()

    def _work(self, worker: PoolThread) -> None:
        while self._take(worker):
            worker.place = self._gate.place()
            try:
                worker.place.wait()
                worker.started = time.monotonic()
                worker.executor.handle(
                    [samples for samples, _ in worker.calls], lambda results: self._answer(worker, results)
                )
            except BaseException as error:  # boundary: whatever a thread meets, the caller must not wait for ever
                self._answer(worker, raised(error))
            worker.place.free()
            with self._lock:
                if worker.given_up:
                    return
                failed = bool(worker.calls)
                self._put_back(worker)
                self._idle += failed
            if failed:
                with suppress(OSError):  # the next call that it takes will say so
                    worker.executor.prepare()  # other threads take the calls meanwhile
        worker.executor.close()

    def _take(self, worker: PoolThread) -> bool:
        """Wait for calls and take them; False when the pool is closed and none is left."""
        while True:
            self._bell.get()
            with self._lock:
                if len(self._threads) > self._limit:
                    self._threads.discard(worker)
                    self._idle -= 1
                    self._bell.put(None)  # for the next thread
                    return False
                if self._waiting:
                    most = worker.executor.most if self._gate.is_open else 1
                    count = max(1, min(len(self._waiting) // self._limit, most))
                    worker.calls.extend(self._waiting.popleft() for _ in range(count))
                    worker.started = math.inf
                    self._idle -= 1
                    return True
                if self._closed:
                    self._bell.put(None)  # for the next thread
                    return False

    def _answer(self, worker: PoolThread, answered: Results | RewardFailure) -> None:
        """Answer the call that a thread is at, unless it was given up."""
        with self._lock:
            if not worker.calls:
                return
            samples, future = worker.calls.popleft()
            worker.started = time.monotonic()
            self._unanswered -= 1
            self._idle += not worker.calls
            given_up, not_tried = self._note(answered), _not_tried(self._hung, self._died)
        answer(future, all_failed(samples, answered) if isinstance(answered, RewardFailure) else answered)
        for samples, future in given_up:
            answer(future, all_failed(samples, not_tried))

    def _note(self, answered: Results | RewardFailure) -> list[Call]:
        """Count calls in a row that failed their thread; the calls that are given up with them. The lock is held."""
        kind = answered.kind if isinstance(answered, RewardFailure) else None
        self._died = self._died + 1 if kind == "died" and self._gives_up else 0
        if kind == "timeout":
            return self._note_hanging()
        if self._died >= MOST_HANGING:
            return self._give_up_waiting()
        self._hung, self._relieved, self._limit = 0, False, self._usual_limit
        for _ in range(len(self._threads) - self._limit):
            self._bell.put(None)  # each of those beyond the limit wakes and ends
        return []

    def _note_hanging(self) -> list[Call]:
        """The same for one that ran out of its time. The lock is held."""
        if not self._gives_up:
            return []
        self._hung += 1
        self._limit = max(self._usual_limit, self._limit - 1)
        return self._give_up_waiting() if self._hung >= MOST_HANGING else []

    def _give_up_waiting(self) -> list[Call]:
        calls = list(self._waiting)
        self._waiting.clear()
        self._unanswered -= len(calls)
        return calls

    def _put_back(self, worker: PoolThread) -> None:
        """Let the calls that a thread did not come to wait again, before all others. The lock is held."""
        for call in reversed(worker.calls):
            self._waiting.appendleft(call)
            self._bell.put(None)
        worker.calls.clear()


def answer(future: Future[Results], results: Results) -> None:
    """Set the results of a call, unless its caller gave it up meanwhile (a cancelled `Scorer.score_async`)."""
    with suppress(InvalidStateError):
        future.set_result(results)


def _not_tried(hung: int, died: int) -> RewardFailure:
    if died:
        return RewardFailure("died", f"was not tried: the {died} calls before it all ended their process")
    return RewardFailure("timeout", f"was not tried: the {hung} calls before it all ran out of their time")


def too_slow(timeout: float, what: str) -> RewardFailure:
    """The failure of a call that was stopped."""
    return RewardFailure("timeout", f"took longer than {timeout:g} s {what}")
