"""The actors: processes that hold one worker and run its methods.

This module and what it imports stay light. A process first takes over the controller's environment; only then are
torch and the worker's own modules loaded, because libraries read their variables when they are loaded.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from verl import env
from verl.ports import free_port

if TYPE_CHECKING:
    from verl.single_controller.ray.hosted_worker import HostedWorker

Header = list[Any]
"""What a call is about, in one argument because each one costs: the caller, the number of the call among the caller's
calls of this worker (an event loop may start them in another order), the role, and the method. The role is empty for
the worker itself and the name of one of the roles of a colocated worker."""
Request = list[str]
"""What a request of a handle is about: the role and the method."""


WARNS = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""Ray's warning about a value that is fetched in an actor with an event loop. It does not tell the loop from a thread,
and all that is fetched here is fetched in threads."""


class HostBase:
    """What both kinds of host have in common.

    Args:
        name: of the worker, for people; Ray puts it before every line that the process prints.
        environment: variables that the process takes over.
        folders: where the controller finds modules.
        directory: the controller's working directory, taken over where the node has it, so that relative paths mean
            the same.
    """

    def __init__(self, name: str, environment: dict[str, str], folders: list[str], directory: str):
        if os.path.isdir(directory):
            os.chdir(directory)
        for variable, value in environment.items():
            env.set_value(variable, value)
        sys.path += [folder for folder in folders if folder not in sys.path]
        self.name = name
        self._place: HostedWorker | None = None

    def __repr__(self) -> str:
        return self.name

    def _introduction(self, ports: tuple[int, int] | None) -> dict[str, Any]:
        """Where this process lives, where it writes, and a port that is free on its node."""
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "logs": tuple(os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)) if _has_proc() else (),
            "port": free_port(ports),
        }

    def _settle(self, boxed_class: list[Any], info: dict[str, Any], threads: int | None, by_reference: bool) -> None:
        from verl.single_controller.ray.hosted_worker import HostedWorker  # from here on torch is loaded

        self._place = HostedWorker(self.name, boxed_class, info, threads, by_reference)

    @property
    def place(self) -> HostedWorker:
        assert self._place is not None, "build comes before the first call"
        return self._place


class WorkerHost(HostBase):
    """A worker without async methods: its calls run one after the other in the process's main thread."""

    def ping(self) -> None:
        """A sign of life."""

    def introduce(self, ports: tuple[int, int] | None = None) -> dict[str, Any]:
        return self._introduction(ports)

    def build(
        self, boxed_class: list[Any], info: dict[str, Any], threads: int | None, by_reference: bool = False
    ) -> None:
        """Construct the worker."""
        self._settle(boxed_class, info, threads, by_reference)

    def describe(self) -> dict[str, Any]:
        """The worker's place among its peers and its roles."""
        return self.place.describe()

    def call(self, header: Header, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method; here calls come in the order in which they were made."""
        _, _, target, method = header
        return self.place.perform(target, method, args, kwargs)

    def request(self, request: Request, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method for a handle; here one at a time, as all calls."""
        target, method = request
        return self.place.perform(target, method, args, kwargs)


class AsyncWorkerHost(HostBase):
    """A worker with async methods, or any object behind a handle.

    Requests to async methods run together in the event loop. Everything else runs in threads: calls of a group one
    after the other in a thread of their own, plain methods for handles in as many as ``num_threads``.
    """

    def __init__(
        self, name: str, environment: dict[str, str], folders: list[str], directory: str, num_threads: int = 1
    ):
        super().__init__(name, environment, folders, directory)
        env.set_default(WARNS, "0")
        self._order = ThreadPoolExecutor(1, thread_name_prefix="verl-calls")
        self._threads = self._order if num_threads == 1 else ThreadPoolExecutor(num_threads, "verl-requests")
        self._call_orders: dict[str, CallOrder] = {}

    async def ping(self) -> None:
        """A sign of life."""

    async def introduce(self, ports: tuple[int, int] | None = None) -> dict[str, Any]:
        return self._introduction(ports)

    async def build(
        self, boxed_class: list[Any], info: dict[str, Any], threads: int | None, by_reference: bool = False
    ) -> None:
        """Construct the worker."""
        await self._in(self._order, self._settle, boxed_class, info, threads, by_reference)
        self.place.loop = asyncio.get_running_loop()

    async def describe(self) -> dict[str, Any]:
        """The worker's place among its peers and its roles."""
        return self.place.describe()

    async def call(self, header: Header, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method in the order of the caller's numbers."""
        caller, number, target, method = header
        turns = self._call_orders.setdefault(caller, CallOrder())
        await turns.wait_for(number)
        work = self._in(self._order, self.place.perform, target, method, args, kwargs)  # in the queue before the next
        turns.done()
        return await work

    async def request(self, request: Request, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method for a handle, concurrently with others."""
        target, method = request
        if self.place.is_async(target, method):
            return await self.place.attend(target, method, args, kwargs)
        return await self._in(self._threads, self.place.perform, target, method, args, kwargs)

    def _in(self, threads: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(threads, partial(function, *args))


class CallOrder:
    """Lets calls of one caller through in the order of their numbers."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Event] = {}

    async def wait_for(self, number: int) -> None:
        if number != self._next:
            await self._waiting.setdefault(number, asyncio.Event()).wait()

    def done(self) -> None:
        self._next += 1
        waiting = self._waiting.pop(self._next, None)
        if waiting is not None:
            waiting.set()


def _has_proc() -> bool:
    return os.path.exists("/proc/self/fd/1")
