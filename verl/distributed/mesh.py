"""How the ranks of a run are arranged."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.distributed.ranks import Ranks
from verl.errors import ConfigError

REPLICATE, SHARD = "replicate", "shard"


def data_parallel_mesh(ranks: Ranks, device: str, fsdp_size: int = -1) -> DeviceMesh:
    """All ranks share one copy of a model, or each ``fsdp_size`` neighbours do (hybrid sharding).

    Args:
        fsdp_size: not positive, or the number of ranks or more: all ranks.

    Returns:
        A mesh ``(shard,)``, or ``(replicate, shard)`` with neighbouring ranks in one shard group.

    Raises:
        ConfigError: ``fsdp_size`` does not divide the number of ranks.
    """
    size = ranks.size if fsdp_size <= 0 else min(fsdp_size, ranks.size)
    if ranks.size % size:
        raise ConfigError(
            f"the {ranks.size} processes do not divide into shard groups of this size",
            key="fsdp_config.fsdp_size",
            got=fsdp_size,
            allowed=[d for d in range(1, ranks.size + 1) if ranks.size % d == 0],
            fix="-1 shards over all of them.",
        )
    if size == ranks.size:
        return init_device_mesh(device, (size,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device, (ranks.size // size, size), mesh_dim_names=(REPLICATE, SHARD))
