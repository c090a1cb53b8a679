"""`Handle`: the asynchronous way to talk to one object, wherever it lives.

Agent loops, replicas, scorers and engines that serve many requests at once are used through a handle; the tagged
methods of a worker group are the batch-synchronous form of the same thing.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from verl.errors import WorkerError, suggest
from verl.outcomes import on_error

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
    with on_error(lambda error: note_origin(error, where)):
        yield


def called_method(target: object, name: str, where: str) -> Callable[..., Any]:
    """The method that a call names.

    Args:
        target: the object behind a handle or in a group; its ``endpoints()`` are the further objects that answer.
        name: ``method``, of the target; or ``Class.method``, of the target or of the endpoint under that class.
        where: names the target in messages.

    Raises:
        WorkerError: there is no such object or method.
    """
    kind, _, method = name.rpartition(".")
    classes = [base.__name__ for base in type(target).__mro__ if base is not object]
    if kind and kind not in classes:
        held = target.endpoints() if hasattr(target, "endpoints") else {}
        endpoints = {base.__name__: endpoint for base, endpoint in held.items()}
        if kind not in endpoints:
            served = [*classes, *endpoints]
            raise WorkerError(f"{where} has no object of the class {kind}", allowed=served, fix=suggest(kind, served))
        target = endpoints[kind]
    function = getattr(target, method, None)  # the name comes from the caller
    if (kind and method.startswith("_")) or not callable(function):
        methods = [label for label, _ in inspect.getmembers(type(target), inspect.isroutine) if label[0] != "_"]
        raise WorkerError(f"{where} has no method {method!r}", allowed=methods, fix=suggest(method, methods))
    return function


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
        """Run a method, ``Class.method``, and return its result; must end when it is cancelled."""

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
        name = _sent_name(method)
        return await self._await(name, self._invoke(name, args, kwargs))

    def cancel(self, method: Callable[..., Any] | None = None) -> int:
        """Cancel the calls in flight, of one method or all; returns how many. Callable from any thread."""
        name = None if method is None else _sent_name(method)
        calls = [(task, loop) for task, (called, loop) in list(self._in_flight.items()) if name in (None, called)]
        for task, loop in calls:
            loop.call_soon_threadsafe(task.cancel)
        return len(calls)

    def with_timeout(self: H, seconds: float | None) -> H:
        """The same object behind a handle with another timeout."""
        other = copy.copy(self)
        other.timeout = seconds
        other._in_flight = {}
        return other

    async def _await(self, name: str, work: Coroutine[Any, Any, Any]) -> Any:
        task, method = asyncio.ensure_future(work), name.rpartition(".")[2]
        self._in_flight[task] = name, asyncio.get_running_loop()
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


def _sent_name(method: Callable[..., Any]) -> str:
    """``Class.method``, without what the class is defined in.

    Raises:
        WorkerError: it is a function of no class.
    """
    *_, kind, name = ["", *method.__qualname__.split(".")]
    if not kind or kind == "<locals>":
        raise WorkerError("a handle calls methods", got=method.__qualname__, fix="Pass Class.method.")
    return f"{kind}.{name}"


def _look(task: asyncio.Task[Any]) -> None:
    """Drop the error of a call that has no waiter any more: asyncio would print it later."""
    if not task.cancelled():
        task.exception()
