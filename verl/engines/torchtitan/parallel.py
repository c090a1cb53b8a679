"""Sizes of TorchTitan's parallelism and its meshes."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

from verl.config.schema.node import key_of
from verl.config.schema.torchtitan import COPIES, EXPERTS, SIZES, TorchTitanEngineConfig
from verl.distributed import Ranks
from verl.engines.torchtitan.package import import_torchtitan
from verl.errors import ConfigError, NotBuiltError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    key = (
        ranks.size,
        parallelism.data_parallel_replicate_degree,
        parallelism.tensor_parallel_degree,
        parallelism.expert_parallel_degree,
        parallelism.pipeline_parallel_degree,
    )
    if key not in _made:
        _made[key] = import_torchtitan("distributed", device).ParallelDims.from_config(parallelism, ranks.size)
        _made[key].build_mesh()
    return _made[key]


@dataclass(frozen=True)
class TitanSizes:
    """The parallel sizes of a run: stages x data x context x tensor, the last ones neighbours.

    Args:
        data: data-parallel ranks, those of hybrid sharding's copies included.
        tensor: ranks that share every linear layer.
        context: ranks that share the tokens of packed rows. For TorchTitan, and for how weights are sharded, they are
            data-parallel ranks: only attention (`UlyssesPlan`) and the end of a pass know of them.
        pipeline: stages.
        expert: ranks that hold all experts of a mixture together; they are ranks of the other kinds, too.
        copies: of the weights.
        parallelism, dims: TorchTitan's own form of them.
    """

    data: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    copies: int
    parallelism: Any
    dims: Any

    @classmethod
    def of(cls, section: TorchTitanEngineConfig, ranks: Ranks, device: str) -> TitanSizes:
        """From the ``torchtitan`` section.

        Raises:
            ConfigError: sizes that do not divide the number of processes.
        """
        names = (*SIZES, COPIES)
        product = math.prod(section[name] for name in names)
        if min(section[name] for name in names) < 1 or ranks.size % product:
            raise ConfigError(
                f"{ranks.size} processes do not divide into {' x '.join(str(section[name]) for name in names)} "
                f"({', '.join(names)})",
                key=key_of(section, names[0]),
                got=section[names[0]],
                allowed=f"sizes of at least 1 whose product divides {ranks.size}",
            )
        tensor, context, pipeline = (section[name] for name in SIZES)
        copies, expert, data = section[COPIES], section[EXPERTS], ranks.size // (tensor * context * pipeline)
        per_copy = ranks.size // (copies * pipeline)
        if expert < 1 or per_copy % expert:
            raise ConfigError(
                f"the {per_copy} processes that hold a copy of the weights cannot share the experts evenly",
                key=key_of(section, EXPERTS),
                got=expert,
                allowed=[n for n in range(1, per_copy + 1) if per_copy % n == 0],
            )
        parallelism = import_torchtitan("config", device).ParallelismConfig(
            data_parallel_replicate_degree=copies,
            data_parallel_shard_degree=data * context // copies,
            tensor_parallel_degree=tensor,
            pipeline_parallel_degree=pipeline,
            expert_parallel_degree=expert,
            spmd_backend=SPMD_BACKEND,
        )
        dims = _meshes(parallelism, ranks, device)
        return cls(data, tensor, context, pipeline, expert, copies, parallelism, dims)

    def stages(self, ranks: Ranks) -> tuple[Ranks, Ranks]:
        """This rank's pipeline, as two groups of the same ranks. Collective."""
        stride = ranks.size // self.pipeline
        pipelines = [list(range(first, ranks.size, stride)) for first in range(stride)]
        return local_group(ranks, pipelines), local_group(ranks, pipelines)

    def sequence(self, ranks: Ranks) -> Ranks:
        """The ranks that share the tokens of this rank's rows. Collective."""
        block = self.context * self.tensor
        parts = [
            list(range(first + number, first + block, self.tensor))
            for first in range(0, ranks.size, block)
            for number in range(self.tensor)
        ]
        return local_group(ranks, parts)

    def peers(self, ranks: Ranks) -> Ranks:
        """The ranks that are handed the same rows as this one, in the order of their numbers. Collective."""
        stride, block = ranks.size // self.pipeline, self.context * self.tensor
        return local_group(
            ranks,
            [
                [stage * stride + first + number for stage in range(self.pipeline) for number in range(block)]
                for first in range(0, stride, block)
            ],
        )

    def speakers(self, ranks: Ranks) -> list[int]:
        """Of each data-parallel rank the first process that has its losses: on the last stage."""
        stride = ranks.size // self.pipeline
        return list(range(ranks.size - stride, ranks.size, self.context * self.tensor))

    def check(self, config: PretrainedConfig, section: TorchTitanEngineConfig) -> None:
        """Raise `ConfigError` where heads or experts of a model do not divide, or the sizes do not fit a mixture."""
        for count, what in ((config.num_attention_heads, "attention"), (config.num_key_value_heads, "KV")):
            if count % self.tensor:
                raise ConfigError(
                    f"the model's {count} {what} heads do not divide",
                    key=key_of(section, "tensor_parallel_size"),
                    got=self.tensor,
                    allowed=[n for n in range(1, count + 1) if count % n == 0],
                )
        heads = config.num_attention_heads // self.tensor
        if heads % self.context:
            raise ConfigError(
                f"the {heads} attention heads of a tensor-parallel rank cannot be exchanged for tokens evenly",
                key=key_of(section, "context_parallel_size"),
                got=self.context,
                allowed=[n for n in range(1, heads + 1) if heads % n == 0],
            )
        if self.pipeline > config.num_hidden_layers:
            raise ConfigError(
                f"the model's {config.num_hidden_layers} layers are fewer than its stages",
                key=key_of(section, "pipeline_parallel_size"),
                got=self.pipeline,
                allowed=f"1 to {config.num_hidden_layers}",
            )
        if self.pipeline > 1 and config.tie_word_embeddings:
            raise NotBuiltError(
                "one weight for embedding and head, which are on different stages, is not built yet",
                key=key_of(section, "pipeline_parallel_size"),
                got=self.pipeline,
                fix="Set it to 1, or strategy=megatron.",
            )
        self._check_experts(int(getattr(config, "num_experts", 0) or 0), section)

    def _check_experts(self, experts: int, section: TorchTitanEngineConfig) -> None:
        key = key_of(section, "expert_parallel_size")
        if not experts:
            if self.expert > 1:
                raise ConfigError("a dense model has no experts to share", key=key, got=self.expert, allowed=[1])
            return
        if experts % self.expert:
            allowed = [n for n in range(1, experts + 1) if experts % n == 0]
            raise ConfigError(
                f"the model's {experts} experts cannot be shared evenly", key=key, got=self.expert, allowed=allowed
            )
        if self.tensor > 1 and self.expert == 1:
            raise NotBuiltError(
                "experts cut by tensor-parallel ranks are not built yet: these share whole experts",
                key=key,
                got=1,
                fix=f"Set it to {self.tensor}, or tensor_parallel_size to 1.",
            )

    @property
    def mesh(self) -> DeviceMesh:
        """Over which weights are sharded: ``(dp_replicate,) fsdp``."""
        return self.dims.get_mesh(["dp_replicate", "fsdp"] if self.copies > 1 else ["fsdp"])

    def layers_here(self, stage: int, layers: int) -> range:
        """The layers of a stage; embedding and head count as one layer each, as for TorchTitan."""
        share, more = divmod(layers + 2, self.pipeline)
        first = stage * share + min(stage, more)
        last = first + share + (stage < more)
        return range(max(0, first - 1), min(layers, last - 1))


def local_group(ranks: Ranks, parts: list[list[int]]) -> Ranks:
    """The part that this rank belongs to, as a group; of parts of one rank there are none. Collective."""
    if len(parts[0]) == 1:
        return Ranks()
    groups = [dist.new_group(part) for part in parts]
    (mine,) = (number for number, part in enumerate(parts) if ranks.rank in part)
    return Ranks(parts[mine].index(ranks.rank), len(parts[mine]), groups[mine])
