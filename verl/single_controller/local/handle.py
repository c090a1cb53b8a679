"""`LocalHandle`: a handle on an object of this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

from verl.single_controller.base.decorator import materialized
from verl.single_controller.base.handle import Handle, called_method
from verl.single_controller.base.rng import RngState, in_worker_call


class LocalHandle(Handle):
    """Async methods run in the caller's event loop; plain methods in threads of the handle, so the loop stays free.

    A plain method that was cancelled or timed out while it ran continues in its thread; its result is dropped.

    Args:
        target: the object.
        max_concurrency: how many plain methods may run at once; 1 keeps them in order, as one process would.
        rng: the object's random-number states, active while a plain method runs. Async methods share the process's
            generators among all requests in flight and must draw by key.
    """

    def __init__(
        self,
        target: object,
        name: str = "",
        timeout: float | None = None,
        max_concurrency: int = 1,
        rng: RngState | None = None,
    ):
        super().__init__(name or type(target).__name__, timeout)
        self._target, self._rng = target, rng
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix=f"verl-{self.name}")

    def close(self) -> None:
        """Let the threads go; calls that have not begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = called_method(self._target, method, self.name)
        args, kwargs = materialized(function, args, kwargs)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self._in_thread(partial(function, *args, **kwargs))
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        if self._rng is not None and in_worker_call():
            return self._guarded(function)  # the call chain above holds the process's generators: a thread would wait
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(context.run, self._guarded, function)
        )

    def _guarded(self, function: Callable[[], Any]) -> Any:
        guard: AbstractContextManager[None] = self._rng.active() if self._rng is not None else nullcontext()
        with guard:
            return function()
