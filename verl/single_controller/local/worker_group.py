"""`LocalWorkerGroup`: workers in this process, called exactly as a remote group is called.

Calls run at once and in order, also those that do not wait: their results, or exceptions, are ready when the caller
asks. Nothing runs while the controller does, so a run is reproducible and a breakpoint in a worker stops everything.
Batches are passed without copying tensors, but with their own ``meta_info``, so that a worker's additions stay its
own, as they would in another process.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from verl.errors import WorkerError, suggest
from verl.ports import free_port
from verl.protocol import DataProto
from verl.single_controller.base.colocated import ColocatedWorker
from verl.single_controller.base.decorator import materialized
from verl.single_controller.base.handle import called_method, noted
from verl.single_controller.base.resources import ClassWithInitArgs, ResourcePool
from verl.single_controller.base.rng import RngState, worker_seed
from verl.single_controller.base.worker import WorkerInfo, build_worker
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.local.event_loop import run_coroutine
from verl.single_controller.local.handle import LocalHandle

LOCALHOST = "127.0.0.1"


class LocalWorkerGroup(WorkerGroup):
    """One worker per process of the pool, all of them here.

    Args:
        resource_pool: how many workers; None means one.
        class_with_init: the worker class and its arguments; may be a colocated class.
        name_prefix: the role's name, for messages and for the workers' seeds.
        seed: the run's seed; each worker starts from `worker_seed` (seed, role, rank).

    Example:
        >>> group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(CriticWorker, config), name_prefix="critic")
        >>> values = group.compute_values(batch)
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        class_with_init: ClassWithInitArgs | None = None,
        name_prefix: str = "",
        seed: int = 0,
        **kwargs: Any,
    ):
        super().__init__(resource_pool, **kwargs)
        if class_with_init is None:
            raise WorkerError("a local worker group needs a class", fix="Pass ClassWithInitArgs(MyWorker, ...).")
        pool = resource_pool if resource_pool is not None else ResourcePool([1])
        role = name_prefix or class_with_init.cls.__name__
        port = free_port()
        workers, rngs = [], []
        for rank, (local_rank, local_size) in enumerate(zip(pool.local_rank_list(), pool.local_world_size_list())):
            info = WorkerInfo(rank, pool.world_size, local_rank, local_size, LOCALHOST, port, role, seed)
            rng = RngState(worker_seed(seed, role, rank))
            with rng.active(), noted(f"{role}[{rank}].__init__"):
                workers.append(build_worker(class_with_init, info))
            rngs.append(rng)
        self._attach(role, class_with_init.cls, workers, rngs, port)

    @classmethod
    def from_workers(
        cls, role: str, worker_class: type, workers: list[Any], rngs: list[RngState], port: int = 0
    ) -> LocalWorkerGroup:
        """A group over workers that exist already."""
        group = cls.__new__(cls)
        WorkerGroup.__init__(group, None)
        group._attach(role, worker_class, workers, rngs, port)
        return group

    def _attach(self, role: str, worker_class: Any, workers: list[Any], rngs: list[RngState], port: int) -> None:
        self.role, self._port = role, port
        self._worker_class = worker_class
        self._workers, self._rngs = workers, rngs
        self._worker_names = [f"{role}[{rank}]" for rank in range(len(workers))]
        self._bind_worker_method(worker_class)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, LocalWorkerGroup]:
        """One group per role of a colocated class, over the same workers, with the roles' own method names."""
        groups = {}
        for role in prefix_set:
            roles = list(self._workers[0].worker_dict) if isinstance(self._workers[0], ColocatedWorker) else []
            if role not in roles:
                raise WorkerError(f"no role {role!r} lives in this group", allowed=roles, fix=suggest(role, roles))
            groups[role] = type(self).from_workers(
                role,
                self._workers[0].class_dict[role].cls,
                [worker.worker_dict[role] for worker in self._workers],
                [worker.rng_dict[role] for worker in self._workers],
                self._port,
            )
        return groups

    def handle(self, rank: int = 0, timeout: float | None = None, max_concurrency: int = 1) -> LocalHandle:
        """The asynchronous form of one worker."""
        return LocalHandle(self._workers[rank], self._worker_names[rank], timeout, max_concurrency, self._rngs[rank])

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        return self._run(method_name, self.spread(args, kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._run(method_name, [(args, kwargs)])[0]

    @property
    def master_address(self) -> str:
        return LOCALHOST

    @property
    def master_port(self) -> str:
        return str(self._port)

    def _is_worker_alive(self, worker: Any) -> bool:
        return True

    def _run(self, method_name: str, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Future[Any]]:
        """Run a method on the first workers, one call each, in the order of their ranks."""
        futures = []
        for (args, kwargs), worker, rng, name in zip(calls, self._workers, self._rngs, self._worker_names):
            future: Future[Any] = Future()
            futures.append(future)
            try:
                with rng.active(), noted(f"{name}.{method_name}"):
                    method = called_method(worker, method_name, self.role)
                    args, kwargs = materialized(method, args, kwargs)
                    result = method(*map(_own, args), **{key: _own(value) for key, value in kwargs.items()})
                    result = run_coroutine(result) if inspect.iscoroutine(result) else result
            except Exception as error:  # boundary: what the caller's ``get`` or ``wait`` raises
                future.set_exception(error)
            else:
                future.set_result(result)
        return futures


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, DataProto) else value
