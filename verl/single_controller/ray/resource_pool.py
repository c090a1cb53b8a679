"""Pools of processes on the cluster: one Ray placement group per node, held until the pool is closed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import ConfigError, WorkerError
from verl.outcomes import on_error
from verl.single_controller.base.resources import ResourcePool
from verl.single_controller.ray import cluster

PLACEMENT_SECONDS = 60.0
"""How long reserved processes may take to become free (an earlier run may be ending)."""


@dataclass(frozen=True)
class ProcessSlot:
    """The place of one process: a bundle of a placement group, and its node."""

    group: PlacementGroup
    bundle: int
    node_id: str

    @property
    def resource(self) -> str:
        """The kind of device that the bundle holds: ``GPU``, ``NPU`` or ``CPU``."""
        specification = self.group.bundle_specs[self.bundle]
        return next((kind for kind in cluster.RESOURCES.values() if kind != "CPU" and kind in specification), "CPU")

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)


class RayResourcePool(ResourcePool):
    """Processes per node: ``RayResourcePool([8, 8])`` is two different nodes with eight processes each.

    Args:
        use_gpu: one device per process; on a cluster that has none, and with ``use_gpu=False``, one CPU each.
        name_prefix: begins the names of the placement groups.
        max_colocate_count: groups of workers that may share the pool's devices.
        detached: the reservation outlives the run.
        accelerator_type: for instance ``H100``; only nodes that have it.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ):
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu, self.detached, self.accelerator_type = use_gpu, detached, accelerator_type
        self.name_prefix = name_prefix or f"verl_{uuid.uuid4().hex[:8]}"
        self.pgs: list[PlacementGroup] | None = None

    def resource(self, device_name: str = "cuda") -> str:
        """What each process takes one of: ``GPU``, ``NPU`` or ``CPU``."""
        resource = cluster.RESOURCES[device_name] if self.use_gpu else "CPU"
        return resource if cluster.has_devices(resource) else "CPU"

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """One placement group per node, sorted by the node's address; reserved at the first call.

        Raises:
            ConfigError: the cluster does not have, or does not free, what the pool asks for.
        """
        if self.pgs is None:
            resource = self.resource(device_name)
            cluster.require_nodes(self.store, resource)
            self.pgs = _reserve(self.store, self._bundle(resource), strategy, name or self.name_prefix, self.detached)
        return self.pgs

    def slots(self, strategy: str = "STRICT_PACK", device_name: str = "cuda") -> list[ProcessSlot]:
        """The place of every process in the order of the ranks."""
        return [slot for group in self.get_placement_groups(strategy, device_name=device_name) for slot in _of(group)]

    def close(self) -> None:
        """Give the reservation back; workers that still live in it are stopped."""
        for group in self.pgs or ():
            remove_placement_group(group)
        self.pgs = None

    def _bundle(self, resource: str) -> dict[str, float]:
        bundle = {resource: 1.0}
        if self.accelerator_type:
            bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-4
        return bundle


class SubRayResourcePool(RayResourcePool):
    """A part of the processes of another pool.

    Args:
        placement_groups: of the whole pool.
        start_bundle_index: the part's first process, counted over all placement groups.
        subgroup_world_size: how many processes it has.
        kwargs: as `RayResourcePool`.
    """

    def __init__(
        self,
        placement_groups: Sequence[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.pgs = list(placement_groups)
        self.start_bundle_index, self.subgroup_world_size = start_bundle_index, subgroup_world_size
        part = self._part([slot for group in self.pgs for slot in _of(group)])
        if len(part) != subgroup_world_size:
            raise WorkerError(
                "the part does not lie inside the pool",
                got=f"processes {start_bundle_index} to {start_bundle_index + subgroup_world_size - 1}",
            )
        nodes = [slot.node_id for slot in part]
        self._store = [nodes.count(node) for node in dict.fromkeys(nodes)]

    def slots(self, strategy: str = "STRICT_PACK", device_name: str = "cuda") -> list[ProcessSlot]:
        return self._part(super().slots(strategy, device_name))

    def close(self) -> None:
        """Nothing: the whole pool holds the reservation."""

    def _part(self, slots: list[ProcessSlot]) -> list[ProcessSlot]:
        return slots[self.start_bundle_index : self.start_bundle_index + self.subgroup_world_size]


def split_resource_pool(
    resource_pool: RayResourcePool, split_size: int | Sequence[int], device_name: str = "cuda"
) -> list[SubRayResourcePool]:
    """Cut a pool into parts of ``split_size`` processes, or of these sizes, in the order of the ranks."""
    world_size = resource_pool.world_size
    sizes = [split_size] * (world_size // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != world_size or min(sizes) < 1:
        raise WorkerError(
            f"a pool of {world_size} cannot be split like this", got=split_size, allowed="sizes that sum to it"
        )
    start = resource_pool.start_bundle_index if isinstance(resource_pool, SubRayResourcePool) else 0
    groups = resource_pool.get_placement_groups(device_name=device_name)
    parts = []
    for size in sizes:
        parts.append(SubRayResourcePool(groups, start, size, **_settings(resource_pool)))
        start += size
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool, device_name: str = "cuda") -> RayResourcePool:
    """One pool over the processes of two whole ones, which keep their reservations; ``rp1`` has the first ranks."""
    if isinstance(rp1, SubRayResourcePool) or isinstance(rp2, SubRayResourcePool):
        raise WorkerError("only whole pools can be merged", fix="Merge the pools first and split the result.")
    first, second = _settings(rp1), _settings(rp2)
    if first != second:
        raise WorkerError("pools with different settings cannot be merged", got=(first, second))
    merged = _MergedPool([*rp1.store, *rp2.store], **first)
    merged.pgs = [
        *rp1.get_placement_groups(device_name=device_name),
        *rp2.get_placement_groups(device_name=device_name),
    ]
    return merged


class _MergedPool(RayResourcePool):
    """A pool over other pools' reservations."""

    def close(self) -> None:
        """Nothing: the merged pools hold their reservations."""


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Placement groups of the pools of ``src_role_names`` that can hold ``resource_pool``, one for each of its nodes.

    The largest groups are taken first; the result is in the order of ``resource_pool.store``.
    """
    free = [group for role in src_role_names for group in resource_pools[role].get_placement_groups()]
    free.sort(key=lambda group: group.bundle_count, reverse=True)
    largest_first = sorted(range(len(resource_pool.store)), key=lambda node: resource_pool.store[node], reverse=True)
    groups: dict[int, PlacementGroup] = {}
    for node in largest_first:
        if not free or free[0].bundle_count < resource_pool.store[node]:
            raise WorkerError(
                "the named pools cannot hold another one",
                got=resource_pool.store,
                allowed=f"{[group.bundle_count for group in free]} are left of {list(src_role_names)}",
            )
        groups[node] = free.pop(0)
    return [groups[node] for node in range(len(resource_pool.store))]


def _settings(pool: RayResourcePool) -> dict[str, Any]:
    return {
        "use_gpu": pool.use_gpu,
        "max_colocate_count": pool.max_colocate_count,
        "detached": pool.detached,
        "accelerator_type": pool.accelerator_type,
    }


def _of(group: PlacementGroup) -> list[ProcessSlot]:
    node_of = placement_group_table(group)["bundles_to_node_id"]
    return [ProcessSlot(group, bundle, node_of[bundle]) for bundle in sorted(node_of)]


def _reserve(
    counts: Sequence[int], bundle: dict[str, float], strategy: str, name: str, detached: bool
) -> list[PlacementGroup]:
    """One placement group per count on nodes that differ, the largest first; then in the order of the addresses."""
    deadline = time.monotonic() + PLACEMENT_SECONDS
    reserved: list[PlacementGroup] = []
    used: list[str] = []
    with on_error(lambda _: [remove_placement_group(group) for group in reserved]):
        for number, count in enumerate(sorted(counts, reverse=True)):
            elsewhere = {"ray.io/node-id": f"!in({','.join(used)})"} if used else {}
            group = placement_group(
                [dict(bundle)] * count,
                strategy=strategy,
                name=f"{name}_{number}",
                lifetime="detached" if detached else None,
                bundle_label_selector=[elsewhere] * count if used else None,
            )
            reserved.append(group)
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise _occupied(counts, bundle)
            used += {slot.node_id for slot in _of(group)}
    order = {node.id: position for position, node in enumerate(cluster.nodes())}
    return sorted(reserved, key=lambda group: order[_of(group)[0].node_id])


def _occupied(counts: Sequence[int], bundle: dict[str, float]) -> ConfigError:
    error = cluster.too_small(counts, next(iter(bundle)), cluster.nodes())
    return ConfigError(
        f"the cluster has enough for the run, but did not free it within {PLACEMENT_SECONDS:g} s",
        key=error.key,
        got=f"processes on nodes: {list(counts)}",
        allowed=error.allowed,
        fix="Another run, or another pool of this one, holds the rest; `ray status` shows who uses what.",
    )
