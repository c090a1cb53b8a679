"""Where the code of tools and simulated users runs: one event loop in a thread of its own, and threads for plain calls.

The sampling of all trajectories shares one event loop, and a batch begins a new one. A tool has a loop that lives as
long as the process instead, so that it may keep connections, and one that never comes back stops no other trajectory:
its call is given up, and if it blocks the whole loop, a new loop takes its place.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.metrics import notice
from verl.outcomes import settle

T = TypeVar("T")
SIGN_OF_LIFE = 2.0
"""Seconds in which a loop that is not blocked answers."""


class TimeLimit(Exception):
    """A call was given up; ``seconds`` is how long it was waited for."""

    def __init__(self, seconds: float):
        super().__init__(f"no answer within {seconds:g} seconds")
        self.seconds = seconds


class ToolRunner:
    """Runs coroutines outside the event loop of the caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # threads that ask for the loop, or give a blocked one up
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, make: Callable[[], Awaitable[T]], timeout: float | None = None) -> T:
        """The result of ``await make()``, which happens on the runner's loop.

        Args:
            timeout: seconds until it is given up; None waits for ever.

        Raises:
            TimeLimit: it was given up.
        """
        loop = self.loop()
        future = asyncio.run_coroutine_threadsafe(_await(make), loop)
        wrapped = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({wrapped}, timeout=timeout)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if done:
            if wrapped.cancelled():  # by the tool's own code: it must not look as if the trajectory were cancelled
                raise RuntimeError("the tool cancelled its own call")
            return wrapped.result()
        wrapped.cancel()
        await self._replace_if_blocked(loop)
        raise TimeLimit(float(timeout or 0.0))

    def call(self, make: Callable[[], Awaitable[T]], timeout: float) -> T:
        """The same from synchronous code; must not be called on the runner's own loop.

        Raises:
            TimeoutError: no result in time.
        """
        return asyncio.run_coroutine_threadsafe(_await(make), self.loop()).result(timeout)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, started if there is none."""
        with self._lock:
            if self._loop is None:
                self._loop = _start_loop()
            return self._loop

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        async def sign() -> None:
            return None

        alive = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sign(), loop))
        done, _ = await asyncio.wait({alive}, timeout=SIGN_OF_LIFE)
        if done:
            return
        notice("tools", "a tool blocks the event loop instead of awaiting; its loop was replaced, its thread is lost")
        with self._lock:
            if self._loop is loop:
                self._loop = None


async def _await(make: Callable[[], Awaitable[T]]) -> T:
    try:
        return await make()
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop of all tools
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tools", daemon=True).start()
    return loop


async def in_thread(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The result of a plain function, run in a daemon thread: one that hangs is left behind, also at the end."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(outcome: Future[T]) -> None:
        if result.done():
            return
        error = outcome.exception()
        if error is None:
            result.set_result(outcome.result())
        elif isinstance(error, StopIteration):
            result.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            result.set_exception(error)

    def target() -> None:
        outcome: Future[T] = Future()
        settle(outcome, lambda: function(*arguments, **named))
        loop.call_soon_threadsafe(deliver, outcome)

    context = contextvars.copy_context()  # a function that is traced belongs to the call that runs it
    threading.Thread(target=context.run, args=(target,), name="tool call", daemon=True).start()
    return await result


_RUNNER = ToolRunner()


def runner() -> ToolRunner:
    """The runner of this process."""
    return _RUNNER
