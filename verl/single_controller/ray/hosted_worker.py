"""Inside a worker's process: the worker, its random numbers, and how one of its methods is run.

A process has one set of python, numpy and torch generators. They belong to whichever role was called last and are
swapped only when another role is called: the swap costs as much as the call, and no other role draws here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from verl import device, env, stacks
from verl.errors import WorkerError, suggest
from verl.metrics import start_logging
from verl.single_controller.base.colocated import ColocatedWorker
from verl.single_controller.base.decorator import materialized
from verl.single_controller.base.handle import called_method
from verl.single_controller.base.rng import RngState, worker_seed
from verl.single_controller.base.worker import WorkerInfo, build_worker
from verl.single_controller.ray import transfer
from verl.single_controller.ray.failures import fetch_references, reported


class HostedWorker:
    """One worker and everything around it.

    Args:
        name: of the worker, for messages.
        boxed_class: a reference to the `ClassWithInitArgs` of the worker, in a list.
        info: fields of the worker's `WorkerInfo`.
        threads: torch's thread count; None shares the node's cores among its workers.
        by_reference: columns of batches that methods return stay in this node's object store.
    """

    def __init__(
        self,
        name: str,
        boxed_class: list[Any],
        info: Mapping[str, Any],
        threads: int | None,
        by_reference: bool = False,
    ):
        self.info, self._by_reference = WorkerInfo(**info), by_reference
        self.loop: asyncio.AbstractEventLoop | None = None
        self._set_environment()
        stacks.listen()
        start_logging()
        device.set_threads(threads or max(1, device.usable_cores() // self.info.local_world_size))
        device.keep_freed_memory()
        transfer.install_transfer()
        self._active_rng = _ActiveRng()
        rng = RngState(worker_seed(self.info.seed, self.info.role, self.info.rank))
        with reported(f"{name}.__init__"):
            (class_with_init,) = fetch_references(boxed_class)
            self._active_rng.take(rng)
            worker = build_worker(class_with_init, self.info)
        self._targets: dict[str, tuple[str, Any, RngState]] = {"": (name, worker, rng)}
        if isinstance(worker, ColocatedWorker):
            for role, inner in worker.worker_dict.items():
                self._targets[role] = f"{role}[{self.info.rank}]", inner, worker.rng_dict[role]

    def _set_environment(self) -> None:
        """What torch.distributed reads with the init method ``env://``."""
        place = {
            "RANK": self.info.rank,
            "WORLD_SIZE": self.info.world_size,
            "LOCAL_RANK": self.info.local_rank,
            "LOCAL_WORLD_SIZE": self.info.local_world_size,
            "MASTER_ADDR": self.info.master_addr,
            "MASTER_PORT": self.info.master_port,
        }
        for variable, value in place.items():
            env.set_value(variable, str(value))

    def describe(self) -> dict[str, Any]:
        """World size, rank, role, address of rank 0, and the roles of a colocated worker."""
        info = self.info
        return {
            "rank": info.rank,
            "world_size": info.world_size,
            "role": info.role,
            "master": (info.master_addr, info.master_port),
        }

    # ---- calls -------------------------------------------------------------------------------------------------

    def perform(self, target: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method to its end; a coroutine runs on the process's event loop meanwhile."""
        name, worker, rng = self._target(target)
        self._active_rng.take(rng)
        with reported(_place(name, method)):
            function = called_method(worker, method, name)
            args, kwargs = _fetched(function, args, kwargs)
            arrived = transfer.arrived_tensors(args, kwargs)
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = asyncio.run_coroutine_threadsafe(result, self._running_loop()).result()
            transfer.check_untouched(arrived)
            return self._sent(result)

    def is_async(self, target: str, method: str) -> bool:
        """Whether a method must run in the event loop."""
        name, worker, _ = self._target(target)
        with reported(_place(name, method)):
            function = called_method(worker, method, name)
        return inspect.iscoroutinefunction(function)

    async def attend(self, target: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an async method in this event loop, concurrently with others; it must draw random numbers by key."""
        name, worker, _ = self._target(target)
        with reported(_place(name, method)):
            function = called_method(worker, method, name)
            if transfer.refers(args, kwargs):  # other requests continue while values are fetched
                args, kwargs = await asyncio.to_thread(_fetched, function, args, kwargs)
            arrived = transfer.arrived_tensors(args, kwargs)
            result = await function(*args, **kwargs)
            transfer.check_untouched(arrived)
            return self._sent(result)

    def _sent(self, result: Any) -> Any:
        return transfer.stored(result) if self._by_reference else result

    def _target(self, target: str) -> tuple[str, Any, RngState]:
        if target not in self._targets:
            roles = [role for role in self._targets if role]
            raise WorkerError(f"no role {target!r} lives in this process", allowed=roles, fix=suggest(target, roles))
        return self._targets[target]

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        assert self.loop is not None, "a class with async methods is hosted by AsyncWorkerHost"
        return self.loop


def _place(name: str, method: str) -> str:
    """A method of a worker, for messages."""
    return f"{name}.{method.rpartition('.')[2]}"


def _fetched(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> transfer.Call:
    """The arguments as values; waits for them."""
    return transfer.fetch_columns(*materialized(function, *transfer.open_shared(args, kwargs)))


class _ActiveRng:
    """Who has the process's generators."""

    def __init__(self) -> None:
        self._rng: RngState | None = None
        self._active: AbstractContextManager[None] | None = None

    def take(self, rng: RngState) -> None:
        if self._rng is rng:
            return
        if self._active is not None:
            self._active.__exit__(None, None, None)
        self._active = rng.active()
        self._active.__enter__()
        self._rng = rng
