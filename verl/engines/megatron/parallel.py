"""Sizes of Megatron-Core's parallelism, its process groups, and the ranks with the same rows as this one."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from verl.config.rules import megatron_fields
from verl.config.schema.role import MegatronEngineConfig
from verl.distributed import Ranks
from verl.errors import ConfigError, EngineError
from verl.weight_sync.resharding import Layout

SECTION = "megatron"
VERSIONS = "megatron-core 0.16"


@dataclass(frozen=True)
class MegatronSizes:
    """The parallel sizes of a run; every process has one set of them.

    Args:
        data: copies of the weights; those that share the tokens of the same rows are ``context`` of them, side by side.
        depths: layers of each group, see `stage_depths`; None before the model is known.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int = 1
    expert_tensor: int = 1
    virtual: int | None = None
    sequence: bool = False
    context: int = 1
    depths: tuple[int, ...] | None = None

    @classmethod
    def of(cls, section: MegatronEngineConfig, ranks: Ranks) -> MegatronSizes:
        """From the ``megatron`` section.

        Raises:
            ConfigError: sizes that do not divide the number of processes.
        """
        tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "context_parallel_size",
        ):
            if section[name] < 1:
                raise ConfigError("a parallel size is at least 1", key=f"{SECTION}.{name}", got=section[name])
        if ranks.size % (tensor * pipeline):
            raise ConfigError(
                f"{ranks.size} processes do not divide into copies of {tensor} x {pipeline}",
                key=f"{SECTION}.tensor_model_parallel_size, {SECTION}.pipeline_model_parallel_size",
                got=f"{tensor}, {pipeline}",
                allowed=f"sizes whose product divides {ranks.size}: {_products(ranks.size)}",
            )
        context, copies = section.context_parallel_size, ranks.size // (tensor * pipeline)
        if copies % context:
            raise ConfigError(
                f"{copies} copies of {tensor} x {pipeline} processes do not divide into groups that share their rows",
                key=f"{SECTION}.context_parallel_size",
                got=context,
                allowed=[n for n in range(1, copies + 1) if copies % n == 0],
            )
        expert = section.expert_model_parallel_size
        shared = tensor if section.expert_tensor_parallel_size is None else section.expert_tensor_parallel_size
        stage = ranks.size // pipeline
        if stage % (expert * shared):
            raise ConfigError(
                f"{expert} x {shared} processes per copy of the experts do not divide the {stage} of a pipeline stage",
                key=f"{SECTION}.expert_model_parallel_size",
                got=expert,
                allowed=[n for n in range(1, stage + 1) if stage % (n * shared) == 0],
            )
        return cls(
            tensor,
            pipeline,
            stage // tensor,
            expert,
            shared,
            megatron_fields.layer_groups(SECTION, section),
            bool(section.sequence_parallel) and tensor > 1,
            context,
        )

    @property
    def layout(self) -> Layout:
        """As the planner of weight transfers wants it; Megatron-Core's own order of ranks."""
        experts, groups = (self.expert, self.expert_tensor), self.virtual or 1
        return Layout(self.tensor, self.pipeline, self.data, *experts, virtual=groups, depths=self.depths)

    def of_model(self, settings: dict[str, Any], section: MegatronEngineConfig) -> MegatronSizes:
        """The same with the layers of each stage.

        Raises:
            ConfigError: heads, layers or experts of the model do not divide.
        """
        heads, groups, layers = (settings[n] for n in ("num_attention_heads", "num_query_groups", "num_layers"))
        for name, count, what in (
            ("tensor_model_parallel_size", heads, "attention heads"),
            ("tensor_model_parallel_size", groups, "KV heads"),
        ):
            _divides(count, self.tensor, name, what)
        if heads % (self.tensor * self.context) and not has_transformer_engine():
            raise ConfigError(
                f"{heads // self.tensor} attention heads of a tensor-parallel rank do not divide among the ranks that "
                "share a row",
                key=f"{SECTION}.context_parallel_size",
                got=self.context,
                allowed=[n for n in range(1, heads // self.tensor + 1) if heads // self.tensor % n == 0],
            )
        if settings.get("q_lora_rank"):
            _divides(settings["q_lora_rank"], self.tensor, "tensor_model_parallel_size", "latent query dimensions")
        if self.virtual is not None and self.pipeline < 2:
            raise ConfigError(
                "several groups of layers per stage need a pipeline",
                key=f"{SECTION}.virtual_pipeline_model_parallel_size",
                got=self.virtual,
                fix="Leave it out, or set pipeline_model_parallel_size to 2 or more.",
            )
        experts = settings.get("num_moe_experts")
        if experts is None and self.expert > 1:
            raise ConfigError(
                "a model without experts cannot share them among processes",
                key=f"{SECTION}.expert_model_parallel_size",
                got=self.expert,
                fix="Set it to 1.",
            )
        if experts is not None:
            _divides(experts, self.expert, "expert_model_parallel_size", "experts")
        return replace(self, depths=megatron_fields.stage_depths(SECTION, section, layers))


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's groups.

    Args:
        tensor, pipeline, data, expert_data: the ranks that differ in one coordinate.
        context: the ranks of ``data`` that have the same rows, and each its part of their tokens.
        peers: the ranks that compute on the same rows as this one, itself included.
        heads: ranks of the world that hold results, one per copy of the model.
        first, last: whether this rank has the first, the last stage.
    """

    tensor: Ranks
    pipeline: Ranks
    data: Ranks
    expert_data: Ranks
    context: Ranks
    embedding: Ranks | None
    peers: Ranks
    heads: list[int]
    first: bool
    last: bool


def join(sizes: MegatronSizes, ranks: Ranks, seed: int) -> ParallelGroups:
    """Make the groups, or find them where another role of this process has made the same ones.

    Raises:
        ConfigError: Megatron-Core is not installed, or another role of this process has other sizes.
    """
    state = import_megatron("parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            context_parallel_size=sizes.context if has_transformer_engine() else 1,
            create_gloo_process_groups=False,
        )
        import_megatron("tensor_parallel").model_parallel_cuda_manual_seed(seed)
        _SHARING[:] = [(sizes.context, *_sharing_rows(sizes, ranks))]
    _check_same(state, sizes)
    return _groups(state, sizes, ranks)


_SHARING: list[tuple[int, Ranks, Ranks]] = []
"""Of this process: the context-parallel size, the ranks that share its tokens, and those that have the same rows."""


def _sharing_rows(sizes: MegatronSizes, ranks: Ranks) -> tuple[Ranks, Ranks]:
    """This rank's context-parallel group, and with the ranks of tensor and pipeline that of its rows. Collective.

    Megatron-Core has no group of the latter, and with its local layers it knows nothing of the former.
    """
    places = sizes.layout.coordinates()
    lines: dict[tuple[int, int, int], list[int]] = {}
    copies: dict[int, list[int]] = {}
    for rank in range(ranks.size):
        copy = int(places.replica[rank]) // sizes.context
        lines.setdefault((int(places.stage[rank]), copy, int(places.tensor[rank])), []).append(rank)
        copies.setdefault(copy, []).append(rank)
    return _local_group(list(lines.values()), ranks), _local_group(list(copies.values()), ranks)


def _local_group(members: list[list[int]], ranks: Ranks) -> Ranks:
    """Every rank makes every group, in one order; this is the one that it is in."""
    local = Ranks()
    for group in members:
        made = torch.distributed.new_group(group) if len(group) > 1 else None
        if ranks.rank in group and made is not None:
            local = Ranks(group.index(ranks.rank), len(group), made)
    return local


def leave() -> None:
    """Forget the groups, before another run starts in this process."""
    state = import_megatron("parallel_state")
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    _SHARING.clear()


def has_transformer_engine() -> bool:
    """Whether its layers can be used."""
    return bool(import_megatron("models.gpt.gpt_layer_specs").HAVE_TE)


def import_megatron(module: str = "") -> ModuleType:
    """A module of Megatron-Core.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Apex and Transformer Engine are optional; errors name them where needed
            return importlib.import_module(f"megatron.core{'.' + module if module else ''}")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise ConfigError(
            "Megatron-Core is not installed",
            key="strategy",
            got="megatron",
            fix="In the checkout: pip install -e '.[megatron]', or use strategy=fsdp2.",
        ) from error


def _groups(state: Any, sizes: MegatronSizes, ranks: Ranks) -> ParallelGroups:
    def as_ranks(group: dist.ProcessGroup) -> Ranks:
        return Ranks(group.rank(), group.size(), group)

    places = sizes.layout.coordinates()
    heads = [
        rank
        for rank in range(ranks.size)
        if places.tensor[rank] == 0
        and places.stage[rank] == sizes.pipeline - 1
        and places.replica[rank] % sizes.context == 0
    ]
    _, context, peers = _SHARING[0]
    embedding = None
    if sizes.pipeline > 1 and state.is_rank_in_embedding_group():
        embedding = as_ranks(state.get_embedding_group())
    return ParallelGroups(
        tensor=as_ranks(state.get_tensor_model_parallel_group()),
        pipeline=as_ranks(state.get_pipeline_model_parallel_group()),
        data=as_ranks(state.get_data_parallel_group(with_context_parallel=True)),
        expert_data=as_ranks(state.get_expert_data_parallel_group()),
        context=context,
        embedding=embedding,
        peers=peers,
        heads=heads,
        first=state.is_pipeline_first_stage(ignore_virtual=True),
        last=state.is_pipeline_last_stage(ignore_virtual=True),
    )


def _check_same(state: Any, sizes: MegatronSizes) -> None:
    settings = {
        "tensor_model_parallel_size": (state.get_tensor_model_parallel_world_size(), sizes.tensor),
        "pipeline_model_parallel_size": (state.get_pipeline_model_parallel_world_size(), sizes.pipeline),
        "expert_model_parallel_size": (state.get_expert_model_parallel_world_size(), sizes.expert),
        "virtual_pipeline_model_parallel_size": (
            state.get_virtual_pipeline_model_parallel_world_size(),
            sizes.virtual,
        ),
        "context_parallel_size": (_SHARING[0][0], sizes.context),
    }
    for name, (before, now) in settings.items():
        if before != now:
            raise ConfigError(
                f"another model of the same process has {before} here: Megatron-Core has one set of groups per process",
                key=f"{SECTION}.{name}",
                got=now,
                fix="Give all roles the same sizes, or a pool of their own with trainer.resource_pools.",
            )


def _divides(count: int, size: int, name: str, what: str) -> None:
    if count % size:
        raise ConfigError(
            f"the model's {count} {what} do not divide",
            key=f"{SECTION}.{name}",
            got=size,
            allowed=[n for n in range(1, count + 1) if count % n == 0],
        )


def _products(world: int) -> str:
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return ", ".join(f"{t}x{p}" for t in divisors for p in divisors if world % (t * p) == 0)


def check_megatron_version() -> None:
    """Raise `EngineError` where Megatron-Core is a version that this engine was not written for."""
    version = import_megatron().__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 16):
        raise EngineError("this version of Megatron-Core is too old", got=version, allowed=f"{VERSIONS} or newer")


def silence_megatron() -> None:
    """Silence what Megatron-Core says at every step: names of torch that it calls by their old ones, advice on CUDA."""
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
