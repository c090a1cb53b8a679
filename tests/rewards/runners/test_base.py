"""A pool takes each call once, in parts that become smaller, and answers every call whatever its executors do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from verl.rewards.runners.base import RunnerPool
from verl.rewards.samples import RewardFailure, RewardResult

WAIT = 60


class Desk:
    """An executor that takes up to 32 calls of one number each; what it does with a call is the test's."""

    most = 32

    def __init__(self, work: Callable[[float], RewardResult | None], seen: list[list[float]]):
        self._work, self._seen = work, seen
        self.prepare: Callable[[], None] = lambda: None

    def handle(self, calls, answer):
        self._seen.append([number for (number,) in calls])
        for (number,) in calls:
            result = self._work(number)
            if result is None:
                return
            answer([result])

    def stop(self):
        return None

    def close(self):
        return None


class Gate:
    """Holds the first call of each thread until `open`, so that what is submitted meanwhile waits together."""

    def __init__(self, work: Callable[[float], RewardResult | None] = RewardResult, threads: int = 1):
        self.seen: list[list[float]] = []
        self._open, self._there, self._inner = threading.Event(), threading.Semaphore(0), work
        self.pool = RunnerPool(lambda: Desk(self._pass, self.seen), threads)
        self._held = [self.pool.submit([-1.0]) for _ in range(threads)]
        for _ in range(threads):
            assert self._there.acquire(timeout=WAIT)

    def _pass(self, number: float) -> RewardResult | None:
        if number < 0:
            self._there.release()
            assert self._open.wait(WAIT)
            return RewardResult(number)
        return self._inner(number)

    def scores(self, *numbers: float) -> list[float | str | None]:
        """What the pool says to numbers that waited together: scores, or the kinds of failures."""
        futures = [self.pool.submit([number]) for number in numbers]
        self._open.set()
        results = [future.result(WAIT)[0] for future in futures]
        return [result.failure.kind if result.failure else result.score for result in results]

    @property
    def parts(self) -> list[list[float]]:
        return [part for part in self.seen if part != [-1.0]]


def test_waiting_calls_are_taken_in_parts_that_become_smaller():
    gate = Gate(threads=2)
    numbers = [float(i) for i in range(64)]
    assert gate.scores(*numbers) == numbers
    assert sorted(map(len, gate.parts), reverse=True) == [32, 16, 8, 4, 2, 1, 1]
    assert sorted(number for part in gate.parts for number in part) == numbers
    gate.pool.close()


def test_calls_that_a_station_left_wait_again_before_all_others():
    once: set[float] = set()

    def work(number):
        if number in (1, 2) and number not in once:
            once.add(number)
            return None
        return RewardResult(number)

    gate = Gate(work)
    assert gate.scores(0, 1, 2, 3) == [0, 1, 2, 3]
    assert gate.parts == [[0, 1, 2, 3], [1, 2, 3], [2, 3]]
    gate.pool.close()


def test_while_a_station_prepares_again_others_take_the_calls_that_it_left():
    prepares, answered = threading.Event(), threading.Event()

    def work(number):
        if threading.current_thread() is first.thread:
            return None
        assert prepares.wait(WAIT)
        return RewardResult(number)

    def prepare():
        prepares.set()
        assert answered.wait(WAIT)

    gate = Gate(work, threads=2)
    first, second = gate.pool._threads
    first.executor.prepare, second.executor.most = prepare, 1
    assert gate.scores(*range(8)) == list(range(8))
    answered.set()
    gate.pool.close()


def test_a_call_at_which_a_station_raises_fails_alone():
    def work(number):
        if number == 1:
            raise ValueError("no such desk")
        return RewardResult(number)

    gate = Gate(work)
    assert gate.scores(0, 1, 2, 3) == [0, "raised", 2, 3]
    assert gate.parts == [[0, 1, 2, 3], [2, 3]]
    assert not gate.pool.busy()
    gate.pool.close()


def test_a_thread_that_is_given_up_fails_the_call_that_it_is_at_and_another_takes_the_rest():
    hangs, released = threading.Event(), threading.Event()

    def work(number):
        if number == 1:
            hangs.set()
            assert released.wait(WAIT)
        return RewardResult(number)

    gate = Gate(work)
    late: list[object] = []

    def give_up():
        assert hangs.wait(WAIT)
        late.extend(gate.pool.give_up_overdue(-1.0, lambda _: [RewardResult(failure=RewardFailure("timeout", "late"))]))

    watch = threading.Thread(target=give_up)
    watch.start()
    assert gate.scores(0, 1, 2, 3) == [0, "timeout", 2, 3]
    watch.join()
    assert len(late) == 1 and gate.parts[:2] == [[0, 1, 2, 3], [2, 3]]
    released.set()  # the thread that was given up answers nothing any more
    late[0].thread.join(WAIT)
    assert not late[0].thread.is_alive() and not gate.pool.busy()
    gate.pool.close()


def test_what_waits_when_a_pool_is_closed_is_answered_and_its_threads_end():
    gate = Gate(lambda number: gate.pool.close() or RewardResult(number), threads=2)
    threads = [worker.thread for worker in gate.pool._threads]
    assert gate.scores(*range(20)) == list(range(20))
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        gate.pool.submit([1.0])


def test_a_caller_that_gives_up_its_call_does_not_disturb_the_calls_behind():
    gate = Gate()
    assert gate.pool.submit([5.0]).cancel()
    assert gate.scores(0, 1) == [0, 1]
    assert gate.parts == [[5, 0, 1]]
    gate.pool.close()
