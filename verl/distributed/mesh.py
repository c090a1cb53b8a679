"""How the ranks of a run are arranged."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.distributed.ranks import Ranks
from verl.errors import ConfigError

REPLICATE, SHARD = "replicate", "shard"
_group: weakref.ref | None = None
_generation = 0
_meshes: list[weakref.ref[DeviceMesh]] = []


def new_mesh(device: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks of the group that this process is in. Collective.

    torch remembers how it computed on a mesh, together with its process groups, and takes two meshes for one where
    ranks and axis names are equal. So in a process that leaves a group and joins another one, the axes have a number
    behind their names, and nothing of a group that is gone is used again.
    """
    global _group, _generation
    world = dist.group.WORLD
    if _group is None or _group() is not world:
        _group = weakref.ref(world)
        _generation += 1
    suffix = "" if _generation == 1 else f"_{_generation}"
    mesh = init_device_mesh(device, shape, mesh_dim_names=tuple(f"{axis}{suffix}" for axis in axes))
    _meshes.append(weakref.ref(mesh))
    return mesh


def release_groups() -> None:
    """Take the process groups out of all meshes, which torch's caches keep until the process ends."""
    while _meshes:
        mesh = _meshes.pop()()
        if mesh is not None:
            mesh._pg_registry.clear()


def data_parallel_mesh(ranks: Ranks, device: str, fsdp_size: int = -1) -> DeviceMesh:
    """All ranks share one copy of a model, or each ``fsdp_size`` peers do (hybrid sharding).

    Args:
        fsdp_size: not positive, or the number of ranks or more: all ranks.

    Returns:
        A mesh ``(shard,)``, or ``(replicate, shard)`` with peer ranks in one shard group.

    Raises:
        ConfigError: ``fsdp_size`` does not divide the number of ranks.
    """
    size = ranks.size if fsdp_size <= 0 else min(fsdp_size, ranks.size)
    if ranks.size % size:
        raise ConfigError(
            f"the {ranks.size} processes do not divide into shard groups of this size",
            key="fsdp_size",
            got=fsdp_size,
            allowed=[d for d in range(1, ranks.size + 1) if ranks.size % d == 0],
            fix="-1 shards over all of them.",
        )
    if size == ranks.size:
        return new_mesh(device, (size,), (SHARD,))
    return new_mesh(device, (ranks.size // size, size), (REPLICATE, SHARD))
