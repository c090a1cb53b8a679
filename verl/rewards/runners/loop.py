"""Async reward functions: all samples at once in an event loop of their own, each with its time limit."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl.outcomes import on_error
from verl.rewards.gate import OPEN, CallGate, CallPlace
from verl.rewards.invoke import raised
from verl.rewards.runners.base import Results, Runner, answer, too_slow
from verl.rewards.runners.thread import interrupt
from verl.rewards.samples import RewardFailure, all_failed

MOST_AT_ONCE = 256
TICK = 0.05
IDLE_TICK = 0.5

Work = Callable[[Any], Awaitable[Results]]


@dataclass
class _Call:
    samples: Sequence[Any]
    future: Future[Results]
    started: float | None = None
    place: CallPlace | None = None


class _State:
    """The loop with its calls; it outlives the runner just long enough to be closed.

    ``lock`` guards the change of loops only. What the garbage collector may call takes no lock: the calls are taken out
    of their dict, which is atomic, by the thread that answers them.
    """

    def __init__(self, work: Work, timeout: float, gate: CallGate):
        self.work, self.timeout, self.gate = work, timeout, gate
        self.lock = threading.Lock()  # callers' threads and the one that watches: a change of loops
        self.calls: dict[int, _Call] = {}
        self.numbers = itertools.count()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.places: asyncio.Semaphore | None = None
        self.stepping: int | None = None
        self.closed = False

    def answer(self, number: int, results: Results) -> None:
        """Give a call its results, unless it has some."""
        call = self.calls.pop(number, None)
        if call is not None:
            answer(call.future, results)


class LoopRunner(Runner):
    """Runs a coroutine function ``work(samples)``, at most 256 calls at once; each may take ``timeout`` seconds."""

    def __init__(self, work: Work, timeout: float, gate: CallGate = OPEN):
        self._state = _State(work, timeout, gate)
        weakref.finalize(self, _close, self._state)

    def submit(self, samples: Sequence[Any]) -> Future[Results]:
        state = self._state
        future: Future[Results] = Future()
        with state.lock:
            if state.closed:
                raise RuntimeError("the reward function was closed")
            if state.loop is None:
                _open(state)
            number = next(state.numbers)
            state.calls[number] = _Call(samples, future)
            _schedule(state, number)
        return future

    def close(self) -> None:
        _close(self._state)


def _open(state: _State) -> None:
    """Start a loop, its thread, and the thread that watches whether the loop still turns. The lock is held."""
    loop = asyncio.new_event_loop()
    # The calls on this loop, for as long as they run.
    state.loop, state.places = loop, asyncio.Semaphore(MOST_AT_ONCE)
    state.thread = threading.Thread(target=_turn, args=(loop,), name="verl-reward-loop", daemon=True)
    state.thread.start()
    threading.Thread(target=_watch, args=(state, loop), name="verl-reward-watch", daemon=True).start()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())  # which end the connections of `verl.serving.client`
        loop.close()


def _schedule(state: _State, number: int) -> None:
    assert state.loop is not None and state.places is not None
    asyncio.run_coroutine_threadsafe(_run(state, number, state.places), state.loop)


async def _run(state: _State, number: int, places: asyncio.Semaphore) -> None:
    async with places:
        call = state.calls.get(number)
        if call is None:
            return
        samples, call.place = call.samples, state.gate.place()
        with on_error(lambda error: state.answer(number, all_failed(samples, raised(error)))):
            try:
                await call.place.reached()
                call.started = time.monotonic()
                results = await asyncio.wait_for(_Steps(state, number, state.work(samples)), state.timeout)
            except TimeoutError:
                results = all_failed(samples, too_slow(state.timeout, "and was cancelled"))
            except asyncio.CancelledError as error:
                results = all_failed(samples, RewardFailure("raised", "it was cancelled", exception=error))
            finally:
                call.place.free()
    state.answer(number, results)


class _Steps:
    """An awaitable that notes which call has the loop while it has it, so that the one which blocks is known."""

    def __init__(self, state: _State, number: int, awaitable: Awaitable[Results]):
        self.state, self.number, self.awaitable = state, number, awaitable

    def __await__(self) -> Generator[Any, Any, Results]:
        steps = self.awaitable.__await__()
        step: Callable[[], Any] = functools.partial(next, steps)
        while True:
            self.state.stepping = self.number
            try:
                waits_for = step()
            except StopIteration as done:
                return done.value
            finally:
                self.state.stepping = None
            try:
                sent = yield waits_for
            except BaseException as error:  # a cancellation: carried over to the call
                step = functools.partial(steps.throw, error)
            else:
                step = functools.partial(steps.send, sent)


def _watch(state: _State, loop: asyncio.AbstractEventLoop) -> None:
    """Ask the loop for signs of life; if none comes while a call is overdue, that call blocks it: replace the loop."""
    while not state.closed and state.loop is loop:
        alive = threading.Event()
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(alive.set)
        while not alive.wait(TICK) and not state.closed:
            if _overdue(state):
                _replace(state, loop)
                return
        time.sleep(TICK if state.calls else IDLE_TICK)


def _overdue(state: _State) -> list[int]:
    latest = time.monotonic() - state.timeout - 2 * TICK
    calls = list(state.calls.items())
    return [number for number, call in calls if call.started is not None and call.started < latest]


def _replace(state: _State, loop: asyncio.AbstractEventLoop) -> None:
    """Give the loop up with the call that blocks it; all others begin again in a fresh one, under new numbers: what the
    old loop says about them when it is ended (that they were cancelled) is no answer."""
    failure = RewardFailure(
        "timeout",
        f"blocked the event loop for more than {state.timeout:g} s: an async function must await what takes long",
    )
    blocking = state.stepping
    late = _overdue(state) if blocking is None else [blocking]  # None: it is in a task that the function started
    with state.lock:
        if state.closed or state.loop is not loop:
            return
        stuck, state.loop = state.thread, None
        failed = {number: call.samples for number, call in list(state.calls.items()) if number in late}
        again = {number: call for number, call in list(state.calls.items()) if number not in failed}
        for call in list(state.calls.values()):
            if call.place is not None:
                call.place.free()  # the loop that would free it may never turn again
        if again:
            _open(state)
        for number, call in again.items():
            new_number = next(state.numbers)
            state.calls[new_number] = _Call(call.samples, call.future)
            state.calls.pop(number, None)  # only now, so that closing meanwhile finds the call under one of the two
            _schedule(state, new_number)
    for number, samples in failed.items():
        state.answer(number, all_failed(samples, failure))
    loop.call_soon_threadsafe(loop.stop)
    if stuck is not None and stuck.ident is not None:
        interrupt(stuck.ident)


def _close(state: _State) -> None:
    state.closed = True
    loop, state.loop = state.loop, None
    for number, call in list(state.calls.items()):
        state.answer(number, all_failed(call.samples, RewardFailure("died", "the reward function was closed")))
    if loop is not None and loop.is_running():
        loop.call_soon_threadsafe(loop.stop)
