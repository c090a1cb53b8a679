"""Sizes of TorchTitan's parallelism and its meshes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

from verl.config.node import key_of
from verl.config.torchtitan import NOT_BUILT
from verl.distributed import Ranks
from verl.engines.torchtitan.package import import_torchtitan
from verl.errors import ConfigError, NotBuiltError

# Its default, spmd_types, shards nothing with the tested version of torch: it stops in fully_shard.
SPMD_BACKEND = "partial_dtensor"


_made: dict[tuple[int, ...], Any] = {}
_group: weakref.ref | None = None


def _meshes(parallelism: Any, ranks: Ranks, device: str) -> Any:
    """TorchTitan's meshes, which all models of a process have in common where their sizes are equal. Collective.

    torch remembers how it computed on a mesh, with its process groups, and takes two meshes for one where ranks and
    axis names are equal. TorchTitan's axes have fixed names, so what was remembered of another group is forgotten.
    """
    global _group
    world = dist.group.WORLD
    if _group is None or _group() is not world:
        if _made:
            debug._clear_sharding_prop_cache()
            clear_redistribute_planner_cache()
        _made.clear()
        _group = weakref.ref(world)
    key = (ranks.size, parallelism.data_parallel_replicate_degree, parallelism.tensor_parallel_degree)
    if key not in _made:
        _made[key] = import_torchtitan("distributed", device).ParallelDims.from_config(parallelism, ranks.size)
        _made[key].build_mesh()
    return _made[key]


@dataclass(frozen=True)
class TitanSizes:
    """The parallel sizes of a run.

    Args:
        data: data-parallel ranks, those of hybrid sharding's copies included.
        tensor: ranks that share every linear layer and the rows of a batch; neighbours.
        copies: of the weights.
        parallelism, dims: TorchTitan's own form of them.
    """

    data: int
    tensor: int
    copies: int
    parallelism: Any
    dims: Any

    @classmethod
    def of(cls, section: Any, ranks: Ranks, device: str) -> TitanSizes:
        """From the ``torchtitan`` section.

        Raises:
            ConfigError: sizes that do not divide the number of processes.
            NotBuiltError: a kind of parallelism that this engine has not yet.
        """
        for name in NOT_BUILT:
            if section[name] > 1:
                raise NotBuiltError(
                    "this parallelism is not built yet for TorchTitan",
                    key=key_of(section, name),
                    got=section[name],
                    fix="Set it to 1 and shard by data_parallel_shard_size and tensor_parallel_size, or use "
                    "strategy=megatron.",
                )
        tensor, copies = section.tensor_parallel_size, section.data_parallel_replicate_size
        if tensor < 1 or copies < 1 or ranks.size % (tensor * copies):
            raise ConfigError(
                f"{ranks.size} processes do not divide into {copies} copies and {tensor} tensor-parallel ranks",
                key=f"{key_of(section, 'tensor_parallel_size')}, data_parallel_replicate_size",
                got=f"{tensor}, {copies}",
                allowed=f"sizes of at least 1 whose product divides {ranks.size}",
            )
        parallelism = import_torchtitan("config", device).ParallelismConfig(
            data_parallel_replicate_degree=copies,
            data_parallel_shard_degree=ranks.size // (tensor * copies),
            tensor_parallel_degree=tensor,
            spmd_backend=SPMD_BACKEND,
        )
        dims = _meshes(parallelism, ranks, device)
        return cls(ranks.size // tensor, tensor, copies, parallelism, dims)

    def check(self, config: Any, section: Any) -> None:
        """Raise `ConfigError` where the heads of a model do not divide."""
        for count, what in ((config.num_attention_heads, "attention"), (config.num_key_value_heads, "KV")):
            if count % self.tensor:
                raise ConfigError(
                    f"the model's {count} {what} heads do not divide",
                    key=key_of(section, "tensor_parallel_size"),
                    got=self.tensor,
                    allowed=[n for n in range(1, count + 1) if count % n == 0],
                )

    @property
    def mesh(self) -> DeviceMesh:
        """Over which weights are sharded: ``(dp_replicate,) fsdp``."""
        return self.dims.get_mesh(["dp_replicate", "fsdp"] if self.copies > 1 else ["fsdp"])
