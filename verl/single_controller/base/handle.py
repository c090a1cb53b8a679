"""`Handle`: the asynchronous way to talk to one object, wherever it lives.

Agent loops, replicas, scorers and engines that serve many requests at once are used through a handle; the tagged
methods of a worker group are the batch-synchronous form of the same thing.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.errors import WorkerError

H = TypeVar("H", bound="Handle")
CANCEL_SECONDS = 1.0
"""How long a cancelled call may take to clean up before it is left alone."""


def note_origin(error: BaseException, where: str) -> None:
    """Add to an exception, which stays as it is otherwise, which worker it comes from."""
    error.add_note(f"(in worker {where})")


@contextmanager
def noted(where: str) -> Iterator[None]:
    """An exception passes as it is, with a note that says which worker and method it comes from."""
    try:
        yield
    except Exception as error:
        note_origin(error, where)
        raise


class Handle(ABC):
    """One object that answers calls.

    Several calls may be in flight. Cancelling the task that awaits a call cancels the call; `cancel` does it from
    outside. An exception of the object arrives unchanged.

    Args:
        name: for messages, for instance ``rollout[0]``.
        timeout: seconds after which a call is given up; None waits for ever.

    Example:
        >>> completion = await handle.call("generate", request)
    """

    def __init__(self, name: str = "", timeout: float | None = None):
        self.name, self.timeout = name, timeout
        self._in_flight: dict[asyncio.Task[Any], tuple[str, asyncio.AbstractEventLoop]] = {}

    @abstractmethod
    def _invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """Run a method and give its result; must let go when it is cancelled."""

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """The result of ``method(*args, **kwargs)``.

        Raises:
            WorkerError: there is no such method, the call took too long, or it was cancelled by `cancel`.
        """
        return await self._await(method, self._invoke(method, args, kwargs))

    def cancel(self, method: str | None = None) -> int:
        """Cancel the calls in flight, of one method or all; returns how many. Callable from any thread."""
        chosen = [(task, loop) for task, (name, loop) in list(self._in_flight.items()) if method in (None, name)]
        for task, loop in chosen:
            loop.call_soon_threadsafe(task.cancel)
        return len(chosen)

    def with_timeout(self: H, seconds: float | None) -> H:
        """The same object behind a handle with another timeout."""
        other = copy.copy(self)
        other.timeout = seconds
        other._in_flight = {}
        return other

    async def _await(self, method: str, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(work)
        self._in_flight[task] = method, asyncio.get_running_loop()
        try:
            await asyncio.wait({task}, timeout=self.timeout)
            if not task.done():
                raise WorkerError(f"{self.name}.{method} did not answer within {self.timeout} s")
            if task.cancelled():
                raise WorkerError(f"{self.name}.{method} was cancelled")
            error = task.exception()
            if error is not None:
                note_origin(error, f"{self.name}.{method}")
                raise error
            return task.result()
        finally:
            del self._in_flight[task]
            if not task.done():
                task.add_done_callback(_look)
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_SECONDS)


def _look(task: asyncio.Task[Any]) -> None:
    """Nobody waits for the call any more: its error concerns nobody, and asyncio would print it later."""
    if not task.cancelled():
        task.exception()
