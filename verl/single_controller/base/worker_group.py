"""`WorkerGroup`: the controller's view of workers that run the same class.

The group has a method for every tagged method of the class; calling it spreads the arguments, runs the workers and
collects. A runtime adds only how one method is run on all workers or on the first, and how its references are awaited.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from verl.errors import WorkerError
from verl.protocol import is_reference, resolve
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    dispatch_all_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
)
from verl.single_controller.base.dispatch import PADDING_SIZE_KEY, trim_padding
from verl.single_controller.base.handle import Handle
from verl.single_controller.base.resources import ClassWithInitArgs, ResourcePool
from verl.stacks import Process

P = ParamSpec("P")
R = TypeVar("R")


class WorkerGroup(ABC):
    """Workers of one class.

    Args:
        resource_pool: where they run; None attaches to workers that exist already.
    """

    def __init__(self, resource_pool: ResourcePool | None, **kwargs: Any):
        self.resource_pool = resource_pool
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._dead: str | None = None
        self._stop_checking = threading.Event()
        self._checker: threading.Thread | None = None

    @classmethod
    def on_device(cls, device_name: str, by_reference: bool = False) -> Callable[..., WorkerGroup]:
        """What makes a group of a pool and a class on devices of that kind: the class, where it does not matter.

        Args:
            by_reference: where workers have processes of their own, columns of the batches that they return stay there.
        """
        return cls

    # ---- what a runtime provides -------------------------------------------------------------------------------

    @abstractmethod
    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start a method on every worker; arguments that are all lists of world_size are handed out one each.

        Returns:
            A reference per worker; `wait` has what is behind them.
        """

    @abstractmethod
    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method on the first worker, with the arguments as they are; returns a reference."""

    @abstractmethod
    def handle(self, rank: int = 0) -> Handle:
        """The asynchronous form of one worker."""

    @abstractmethod
    def _is_worker_alive(self, worker: Any) -> bool:
        """Whether a worker can still answer."""

    def wait(self, references: Any) -> Any:
        """The value behind a reference or behind each of a list; a worker's exception is raised as it is."""
        return resolve([references])[0] if is_reference(references) else resolve(references)

    # ---- execution ---------------------------------------------------------------------------------------------

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all` under its longer name."""
        return self.execute_all(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all`, and wait."""
        return self.wait(self.execute_all(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero` under its longer name."""
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero`, and wait."""
        return self.wait(self.execute_rank_zero(method_name, *args, **kwargs))

    def spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each worker."""
        size = self.world_size
        values = [*args, *kwargs.values()]
        if all(isinstance(value, list) and len(value) == size for value in values):
            return [(tuple(v[i] for v in args), {k: v[i] for k, v in kwargs.items()}) for i in range(size)]
        return [(args, kwargs)] * size

    def start_helpers(
        self, class_with_init: ClassWithInitArgs, number: int, name: str, seed: int = 0
    ) -> Sequence[Handle]:
        """Objects of a class, each in a separate process that has no device and ends with this group; their handles.

        Raises:
            WorkerError: this runtime has no other processes.
        """
        raise WorkerError("this runtime has no processes but this one", got=name, fix="Use trainer.runtime=ray.")

    # ---- the group itself --------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self._workers)

    @property
    def addresses(self) -> list[str]:
        """The address of each worker's node, by rank."""
        return ["127.0.0.1"] * self.world_size

    @property
    def workers(self) -> list[Any]:
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        return self._worker_names

    def placement(self) -> str:
        """Where the workers are, one line each."""
        return "\n".join(f"{name}: this process" for name in self._worker_names)

    def look_at_processes(self) -> list[Process]:
        """State and stacks of the workers' own processes, where they have any, even of one that hangs."""
        return []

    def dispatch_ranks(self, mesh_name: str) -> list[int]:
        """Each worker's data-parallel rank on a mesh; the workers are queried once."""
        self._learn_mesh(mesh_name)
        return self._dispatch_info[mesh_name]

    def data_parallel_size(self, mesh_name: str) -> int:
        """Parts into which a batch is cut on a mesh."""
        return max(self.dispatch_ranks(mesh_name)) + 1

    def collect_flags(self, mesh_name: str) -> list[bool]:
        """Whether each worker's results are collected on a mesh."""
        self._learn_mesh(mesh_name)
        return self._collect_info[mesh_name]

    def _learn_mesh(self, mesh_name: str) -> None:
        if mesh_name in self._dispatch_info:
            return
        ranks = self.execute_all_sync("query_dispatch_info", mesh_name)
        flags = self.execute_all_sync("query_collect_info", mesh_name)
        speakers = sorted(rank for rank, speaks in zip(ranks, flags) if speaks)
        if speakers != list(range(max(ranks) + 1)):
            raise WorkerError(
                f"on the mesh {mesh_name!r} exactly one worker must be collected for each data-parallel rank",
                got={"ranks": ranks, "collected": flags},
                fix="Check the workers' set_dispatch_collect(mesh_name, dispatch_dp_rank, collect_dp_rank).",
            )
        self._dispatch_info[mesh_name], self._collect_info[mesh_name] = ranks, flags

    def shares_processes(self, other: WorkerGroup) -> bool:
        """Whether the two groups' calls take turns, because the same processes run them."""
        return True

    # ---- aliveness ---------------------------------------------------------------------------------------------

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Look after the workers from a background thread; once one is gone, every further call raises WorkerError."""
        if self._checker is not None:
            return
        self._stop_checking.clear()
        self._checker = threading.Thread(
            target=self._check_workers, args=(every_n_seconds,), name="verl-aliveness", daemon=True
        )
        self._checker.start()

    def stop_worker_aliveness_check(self) -> None:
        self._stop_checking.set()
        if self._checker is not None:
            self._checker.join()
            self._checker = None

    def _check_workers(self, every_n_seconds: float) -> None:
        while not self._stop_checking.wait(every_n_seconds):
            for rank, worker in enumerate(self._workers):
                if not self._is_worker_alive(worker):
                    self._dead = self._worker_names[rank] if rank < len(self._worker_names) else f"rank {rank}"
                    return

    def check_alive(self) -> None:
        """Raise if a worker was found dead."""
        if self._dead is not None:
            raise WorkerError(f"the worker {self._dead} is dead", fix="Its own log holds the reason.")

    # ---- binding -----------------------------------------------------------------------------------------------

    def _bind_worker_method(self, user_defined_cls: type) -> list[str]:
        """Give the group a method for every tagged method of the class; returns their names."""
        bound = []
        for name, method in inspect.getmembers(user_defined_cls, inspect.isroutine):
            tag = getattr(method, MAGIC_ATTR, None)
            if tag is None:
                continue
            if inspect.getattr_static(type(self), name, None) is not None or name in vars(self):
                raise WorkerError(
                    f"a worker method cannot be called {name!r}, the worker group has that name", got=user_defined_cls
                )
            setattr(self, name, self._group_method(name, method, tag))
            bound.append(name)
        return bound

    def _group_method(self, name: str, method: Callable[..., Any], tag: dict[str, Any]) -> Callable[..., Any]:
        mode, blocking = tag["dispatch_mode"], tag["blocking"]
        functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
        dispatch_fn, collect_fn = functions["dispatch_fn"], functions["collect_fn"]
        if mode is Dispatch.ONE_TO_ALL and tag["execute_mode"] is Execute.RANK_ZERO:
            dispatch_fn = dispatch_all_to_all  # the one worker gets the arguments themselves, not a list for all
        execute_name = get_predefined_execute_fn(tag["execute_mode"])["execute_fn_name"]
        execute = {"execute_all": self.execute_all, "execute_rank_zero": self.execute_rank_zero}[execute_name]

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.check_alive()
            args, kwargs = dispatch_fn(self, *args, **kwargs)
            pad_size = kwargs.pop(PADDING_SIZE_KEY, 0)
            output = execute(name, *args, **kwargs)
            if blocking:
                output = self.wait(output)
            return trim_padding(collect_fn(self, output), pad_size)

        return call


@overload
def collected(group: WorkerGroup, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[P, R]: ...


@overload
def collected(group: WorkerGroup, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]: ...


def collected(group: WorkerGroup, method: Callable[..., Any]) -> Callable[..., Any]:
    """A tagged method of a group, whose tag puts the workers' results together or lets one worker give it.

    Args:
        method: of the workers' class or a base of it, as that class has it; an override runs.

    Example:
        >>> outputs = collected(group, ModelWorker.infer)(batch, options)
    """
    return _bound(group, method)


def by_rank(group: WorkerGroup, method: Callable[Concatenate[Any, P], R]) -> Callable[P, list[R]]:
    """A tagged method of a group, whose tag leaves the results as they are: one per rank that is collected."""
    return _bound(group, method)


def _bound(group: WorkerGroup, method: Callable[..., Any]) -> Callable[..., Any]:
    """What `WorkerGroup._bind_worker_method` gave the group under the method's name.

    Raises:
        WorkerError: the class of the workers has no such method.
    """
    bound: Callable[..., Any] | None = getattr(group, method.__name__, None)
    if bound is None:
        fix = "Tag it with @register in the class of the workers."
        raise WorkerError(f"the workers of this group have no method {method.__qualname__}", fix=fix)
    return bound


__all__ = ["ClassWithInitArgs", "ResourcePool", "WorkerGroup", "by_rank", "collected"]
