"""Where workers run: pools of processes, delayed construction, and which role gets which pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from verl import device
from verl.errors import ConfigError, WorkerError, suggest
from verl.single_controller.base.roles import Role


class ResourcePool:
    """Processes per node: ``ResourcePool([8, 8])`` is two nodes with eight processes each."""

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ):
        self._store = list(process_on_nodes or ())
        for count in self._store:
            _check_count(count)
        self.max_colocate_count, self.n_gpus_per_node = max_colocate_count, n_gpus_per_node

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store})"

    def add_node(self, process_count: int) -> None:
        _check_count(process_count)
        self._store.append(process_count)

    @property
    def store(self) -> list[int]:
        return self._store

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For each process, how many processes its node has: ``[2, 1]`` gives ``[2, 2, 1]``."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each process, its number on its node: ``[2, 1]`` gives ``[0, 1, 0]``."""
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A class and its constructor arguments, to be built where the worker lives."""

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any):
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


def unwrapped(worker_class: Any) -> Any:
    """The class under ``ray.remote``, or what is given."""
    metadata = getattr(worker_class, "__ray_metadata__", None)
    return worker_class if metadata is None else metadata.modified_class.__ray_actor_class__


class ResourcePoolManager:
    """The pools of a run and which role lives in which.

    Args:
        resource_pool_spec: pool name -> processes per node.
        mapping: role (or role name) -> pool name; roles of one pool share its processes.
        max_colocate_count: groups of workers that may share the devices of a pool that is made here; None: ten. The
            roles of a pool are one group.
        resource_pool_dict: pools that exist already, by name; None: they are made.
        device_kind: what each process gets one of; on ``cpu`` nothing is counted.
        devices_per_node: how many devices each node has; None asks this machine.
        pool_class: the runtime's pool.

    Raises:
        ConfigError: a role names an unknown pool, or the pools need more devices than there are.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role | str, str],
        max_colocate_count: int | None = None,
        resource_pool_dict: Mapping[str, ResourcePool] | None = None,
        device_kind: str = "cpu",
        devices_per_node: Sequence[int] | None = None,
        pool_class: Callable[..., ResourcePool] = ResourcePool,
    ):
        self.resource_pool_spec = {name: list(counts) for name, counts in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self._pool_of = {str(role): pool for role, pool in mapping.items()}
        self.max_colocate_count = max_colocate_count
        self.resource_pool_dict: dict[str, ResourcePool] = dict(resource_pool_dict or {})
        options = {} if max_colocate_count is None else {"max_colocate_count": max_colocate_count}
        self._pool_class = partial(pool_class, **options)
        for role, pool in self._pool_of.items():
            if pool not in self.resource_pool_spec:
                raise ConfigError(
                    f"the role {role!r} is placed in an unknown pool",
                    got=pool,
                    allowed=sorted(self.resource_pool_spec),
                    fix=suggest(pool, self.resource_pool_spec),
                )
        if devices_per_node is None and device_kind != "cpu":
            devices_per_node = [device.device_count(device_kind)]
        if devices_per_node is not None:
            self._check_resource_available(list(devices_per_node), device_kind)

    def create_resource_pool(self) -> None:
        """Make the pools; they reserve nothing by themselves."""
        self.resource_pool_dict = {name: self._pool_class(counts) for name, counts in self.resource_pool_spec.items()}

    def get_resource_pool(self, role: Role | str) -> ResourcePool:
        """The pool of a role; made on demand."""
        if str(role) not in self._pool_of:
            raise WorkerError(f"no pool is assigned to the role {str(role)!r}", allowed=sorted(self._pool_of))
        if not self.resource_pool_dict:
            self.create_resource_pool()
        return self.resource_pool_dict[self._pool_of[str(role)]]

    def get_n_gpus(self) -> int:
        """Processes over all pools; each has one device."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())

    def _check_resource_available(self, devices_per_node: list[int], kind: str) -> None:
        if not fit_together(self.resource_pool_spec.values(), devices_per_node):
            raise ConfigError(
                f"the machines do not have the {kind} devices that the resource pools ask for",
                key="trainer.n_gpus_per_node",
                got=self.resource_pool_spec,
                allowed=f"devices per node: {devices_per_node}",
                fix="Lower trainer.n_gpus_per_node or trainer.nnodes.",
            )


def fit_together(pools: Iterable[Sequence[int]], devices_per_node: Iterable[int]) -> bool:
    """Whether the nodes hold all pools: their nodes are placed on the real ones, largest first, as the runtime has to.

    Args:
        pools: processes of each pool on each of its nodes.
    """
    free = list(devices_per_node)
    for count in sorted((count for counts in pools for count in counts), reverse=True):
        free.sort(reverse=True)
        if not free or free[0] < count:
            return False
        free[0] -= count
    return True


def _check_count(count: Any) -> None:
    if not isinstance(count, int) or count < 1:
        raise ConfigError("a node of a resource pool has at least one process", got=count)
