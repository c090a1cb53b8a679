"""`Handle`: the asynchronous way to talk to one object, wherever it lives.

Agent loops, replicas, scorers and engines that serve many requests at once are used through a handle; the tagged
methods of a worker group are the batch-synchronous form of the same thing.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from verl.errors import WorkerError, suggest

H = TypeVar("H", bound="Handle")
P = ParamSpec("P")
R = TypeVar("R")
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


def method_of(target: Any, name: str, where: str) -> Callable[..., Any]:
    """The method that a call names.

    Args:
        target: the object behind a handle or in a group. What its ``endpoints()`` lists answers calls, too.
        name: ``method``, of the target; or ``Class.method``, of the first of these objects that is of that class.
        where: names the target in messages.

    Raises:
        WorkerError: there is no such object or method.
    """
    kind, _, method = name.rpartition(".")
    objects = [target, *_endpoints(target)] if kind else [target]
    named = [one for one in objects if not kind or kind in _class_names(one)]
    if not named:
        known = sorted({label for one in objects for label in _class_names(one)})
        raise WorkerError(f"{where} has no object of the class {kind}", allowed=known, fix=suggest(kind, known))
    function = getattr(named[0], method, None)  # the name comes from the caller
    if (kind and method.startswith("_")) or not callable(function):
        known = [label for label, _ in inspect.getmembers(type(named[0]), inspect.isroutine) if label[0] != "_"]
        raise WorkerError(f"{where} has no method {method!r}", allowed=known, fix=suggest(method, known))
    return function


def _endpoints(target: Any) -> Sequence[object]:
    return target.endpoints() if hasattr(target, "endpoints") else ()


def _class_names(one: object) -> list[str]:
    return [kind.__name__ for kind in type(one).__mro__ if kind is not object]


class Handle(ABC):
    """One object that answers calls, and the objects that it holds for others (`Worker.endpoints`).

    Several calls may be in flight. Cancelling the task that awaits a call cancels the call; `cancel` does it from
    outside. An exception of the object arrives unchanged.

    Args:
        name: for messages, for instance ``rollout[0]``.
        timeout: seconds after which a call is given up; None waits for ever.

    Example:
        >>> completion = await handle.call(Sampler.generate, request)
    """

    def __init__(self, name: str = "", timeout: float | None = None):
        self.name, self.timeout = name, timeout
        self._in_flight: dict[asyncio.Task[Any], tuple[str, asyncio.AbstractEventLoop]] = {}

    @abstractmethod
    def _invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """Run a method, ``Class.method``, and give its result; must let go when it is cancelled."""

    @overload
    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...

    @overload
    async def call(self, method: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of ``method(*args, **kwargs)``.

        Args:
            method: of the object's class or a base of it, as that class has it (``Sampler.generate``); what runs is
                the object's override. Nothing of the function but its names is sent.

        Raises:
            WorkerError: there is no such method, the call took too long, or it was cancelled by `cancel`.
        """
        name = ".".join(method.__qualname__.split(".")[-2:])
        return await self._await(method.__name__, self._invoke(name, args, kwargs))

    def cancel(self, method: Callable[..., Any] | None = None) -> int:
        """Cancel the calls in flight, of one method or all; returns how many. Callable from any thread."""
        name = None if method is None else method.__name__
        chosen = [(task, loop) for task, (called, loop) in list(self._in_flight.items()) if name in (None, called)]
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
