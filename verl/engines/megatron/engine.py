"""The Megatron-Core backend: tensor, pipeline, context and expert parallelism, driven by Megatron-Core's own schedules.

Rows, micro-batches, denominators, losses, clipping and checkpoints are those of every engine; here are the stages, the
schedule, and the way of weights between the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl import distributed
from verl.algorithms.aggregation import LossNorm
from verl.algorithms.losses import LossFn, loss_of_rows
from verl.algorithms.schedules import build_schedule
from verl.checkpoint.state import StateSection
from verl.config.schema.model import HFModelConfig
from verl.config.schema.role import FSDPEngineConfig, MegatronEngineConfig, OptimizerConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.distributed.metrics import merge_metrics
from verl.engines.base import DataRank
from verl.engines.megatron.adapters import Adapters
from verl.engines.megatron.forward import Part, StageForward
from verl.engines.megatron.gradients import Gradients
from verl.engines.megatron.layers import build_chunks, padded_vocabulary
from verl.engines.megatron.optimizer import ShardedState, optimizer_section
from verl.engines.megatron.parallel import (
    MegatronSizes,
    check_megatron_version,
    import_megatron,
    join,
    silence_megatron,
)
from verl.engines.megatron.replay import StageReplay
from verl.engines.megatron.routers import RouterLoss, StageRouters
from verl.engines.megatron.weights import Read, WeightTable, check_given, model_templates
from verl.engines.optimizer import move_optimizer_state
from verl.engines.rank_work import RankWork
from verl.engines.recorded_experts import local_experts
from verl.engines.rows import MicroBatch
from verl.engines.saving import WeightsToWrite, weights_to_write
from verl.engines.sequence_parallel import rows_of_peers
from verl.engines.settings import PassSettings
from verl.engines.torch_engine import LOADERS, TorchEngine
from verl.errors import ConfigError
from verl.metrics import MetricSet, log
from verl.models import count_parameters
from verl.models.config import import_external
from verl.models.loading import value_head
from verl.models.lora import LoraSettings
from verl.models.megatron import megatron_family, soft_caps
from verl.models.router_replay import COLUMN
from verl.models.slices import SlicedFolder
from verl.models.weights import named_tensors, names_on_disk
from verl.protocol import DataProto
from verl.protocol.sharding import ShardSpec
from verl.weight_sync.resharding import Layout, Resharder, make_plan

LossOfPart = tuple[Tensor, Tensor, dict[str, Any]]
"""What Megatron-Core takes of a loss: its value, the number of its tokens, and what is reported."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Piece = Callable[[str], Tensor]
"""Name of a full tensor -> this rank's part of it."""


class Stages(nn.Module):
    """This rank's stages, with what the rest of the library asks a model for."""

    def __init__(self, chunks: list[nn.Module], blueprint: PreTrainedModel):
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.config = blueprint.config
        self._generates = bool(blueprint.can_generate())
        self.generation_config = getattr(blueprint, "generation_config", None)

    def can_generate(self) -> bool:
        """Whether the full model is a language model."""
        return self._generates


class MegatronEngine(TorchEngine):
    """A model over tensor x pipeline x context x data (x expert) parallel processes.

    Args:
        model, optim, kind, grad_clip, total_training_steps, seed: as for `PlainEngine`.
        engine: the ``megatron`` section.
        passes: only its ``router_replay`` is read.
        device: ``cpu`` works where Megatron-Core's CUDA calls are answered (the tests do that); else an accelerator.

    Raises:
        ConfigError: sizes that do not divide processes, heads, layers or experts; Megatron-Core is not installed.
        ModelError: the family has no table, or its weights do not fit it.
    """

    aligns_rows = False
    scales_loss = False

    @classmethod
    def section(
        cls, fsdp: FSDPEngineConfig, megatron: MegatronEngineConfig, torchtitan: TorchTitanEngineConfig | None = None
    ) -> FSDPEngineConfig | MegatronEngineConfig | TorchTitanEngineConfig:
        return megatron

    def __init__(
        self,
        model: HFModelConfig,
        engine: MegatronEngineConfig,
        optim: OptimizerConfig | None = None,
        *,
        kind: str = "causal_lm",
        grad_clip: float | None = 1.0,
        total_training_steps: int = 1,
        device: str = "cpu",
        seed: int | None = None,
        passes: PassSettings | None = None,
    ):
        self._introduce(model, engine, kind, grad_clip, device)
        import_external(model.external_lib)
        check_megatron_version()
        silence_megatron()
        self.ranks = distributed.join_group(device=device)
        self.sizes = MegatronSizes.of(engine, self.ranks)
        top_k = 0 if passes is None else passes.top_k
        self.model = self._build(model, engine, engine.seed if seed is None else seed, top_k)
        self.routers, self.activations = StageRouters(self.model.chunks, self.table.settings, self.forward), None
        self.router_loss = RouterLoss(list(self.model.chunks), self.sizes, self.forward)
        self.skips_constant_rows = not self.router_loss.coefficient
        if passes is not None and passes.router_replay and kind == "causal_lm":
            self.forward.routing = StageReplay(self.model.chunks, self.table.settings)
        self.gradients = Gradients(
            self.trainable.trained, self.sizes, self.groups, self.ranks, trains=optim is not None
        )
        self.optimizer = self.scheduler = None
        if optim is not None:
            shares = bool(engine.use_distributed_optimizer)
            section = optimizer_section(optim)
            self.stepper = ShardedState(self.trainable, self.gradients, self.groups, section, device, shares)
            self.optimizer = self.stepper.optimizer
            self.scheduler = build_schedule(self.optimizer, optim, total_training_steps)

    # ---- building ----------------------------------------------------------------------------------------------

    def _build(self, model: Any, engine: Any, seed: int, top_k: int = 0) -> nn.Module:
        def plan() -> tuple[Any, None]:
            blueprint: Any = LOADERS[self.kind](
                model.path,
                dtype=self.dtype,
                override_config=dict(model.override_config or {}),
                trust_remote_code=model.trust_remote_code,
                external_lib=model.external_lib,
                hf_config_path=model.hf_config_path,
                seed=seed,
                device="meta",
            )
            family = megatron_family(blueprint.config.get_text_config())
            settings = family.settings(blueprint.config.get_text_config())
            if soft_caps(blueprint.config.get_text_config())[0] is not None and not model.use_remove_padding:
                raise ConfigError(
                    "the attention of padded rows does not bound its scores as this model does",
                    key="use_remove_padding",
                    got=False,
                    fix="Set it to true, or strategy=fsdp2.",
                )
            self.sizes = self.sizes.of_model(settings, engine)
            return (blueprint, family, settings), None

        (self.blueprint, family, settings), _ = self.ranks.together(plan)
        self.architecture = type(self.blueprint).__name__
        config = self.blueprint.config.get_text_config()
        self.groups = join(self.sizes, self.ranks, seed)
        self.peers, self.num_peers = self.groups.peers, self.groups.peers.size
        chunks = build_chunks(config, settings, self.sizes, self.groups, engine, self.dtype, self.kind)
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in names_on_disk(self.blueprint, _detached(self.blueprint)).items()
        }
        tied = bool(config.tie_word_embeddings) and self.kind == "causal_lm"
        templates = model_templates(family, settings, self.kind, tied, shapes)
        self.table = WeightTable(
            templates, shapes, settings, self.sizes, self.groups, chunks, itemsize=self.dtype.itemsize
        )
        self.adapters = self._read_folder(model.path, LoraSettings.of(model), chunks, seed)
        self.trainable = self.table if self.adapters is None else self.adapters.table
        width = padded_vocabulary(config.vocab_size, self.sizes.tensor) // self.sizes.tensor
        self.forward: Any = StageForward(
            self.kind,
            self.sizes,
            self.groups,
            config.vocab_size,
            width,
            packed=bool(model.use_remove_padding),
            sequence=bool(chunks[0].config.sequence_parallel),  # type: ignore[union-attr]
            softcap=soft_caps(config)[1],
            top_k=top_k,
        )
        held = sum(b.parameter.numel() for b in self.table.bound)
        log.info("MegatronEngine: %s holds %d of %d parameters", self.ranks, held, self.num_parameters)
        return Stages(chunks, self.blueprint)

    def _read_folder(
        self, path: str, adapter: LoraSettings | None, chunks: list[nn.Module], seed: int
    ) -> Adapters | None:
        """Each rank reads its own slices; a new value head and adapters are drawn alike on all of them."""

        def fill() -> tuple[Adapters | None, None]:
            with SlicedFolder.opened(path) as folder:

                def read(name: str, axis: int, low: int, high: int) -> Tensor:
                    if name not in folder and name.startswith("score."):
                        return _new_head(name, self.table.shapes[name], seed)
                    return folder.read(name, axis, low, high)

                self.table.fill(read)
                self.table.tell_unused(folder)
                if adapter is None:
                    return None, None
                head = value_head(self.blueprint) if self.kind == "value" else None
                return Adapters(self.blueprint, adapter, self.table, chunks, read, seed=seed, head=head), None

        return self.ranks.together(fill)[0]

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.blueprint)

    # ---- passes ------------------------------------------------------------------------------------------------

    def infer(self, batch: DataProto, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        pooled, mine = rows_of_peers(batch, self.peers)
        width = batch.tensors["responses"].shape[1]
        results = super().infer(pooled, *args, **kwargs)  # zeros except on the last stage: the sum is its result
        experts = results.pop(COLUMN, None)
        local = {name: self.groups.pipeline.sum(values)[mine, :width] for name, values in results.items()}
        if experts is not None:  # each rank knows its layers and its tokens, and has NO_RECORD for the others
            every = self.peers.max(experts.int()).to(experts.dtype)
            local[COLUMN] = local_experts(every, pooled, batch, mine)
        return local

    def _passes(
        self, work: RankWork, outputs: Sequence[str], temperature: float
    ) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        results: list[tuple[Tensor, dict[str, Tensor]]] = []
        per_token = [name for name in outputs if name != COLUMN]

        def note(stage: nn.Module, part: Part) -> None:
            results.append((part.micro.index, {COLUMN: self.forward.experts(stage, part)}))

        def keep(output: Tensor, part: Part) -> Tensor:
            if len(part.micro.index):
                results.append((part.micro.index, self.forward.read(output, part, per_token, temperature)))
            return output.new_zeros(())

        noted = note if COLUMN in outputs else None
        self._schedule(self._micro_batches(work), keep, forward_only=True, noted=noted)
        return results

    def train_batch(self, batch: DataProto, *args: Any, **kwargs: Any) -> MetricSet:
        return super().train_batch(rows_of_peers(batch, self.peers)[0], *args, **kwargs)

    @property
    def data_rank(self) -> DataRank:
        data, shared = self.groups.data, self.sizes.context
        return DataRank(data.rank // shared, data.size // shared, self.ranks.rank in self.groups.heads)

    def _budget(self, *args: Any, **kwargs: Any) -> int | None:
        budget = super()._budget(*args, **kwargs)
        return None if budget is None else budget * self.sizes.context  # the token budget is per rank

    def _accumulate(
        self, work: RankWork, tensors: Any, loss_fn: LossFn, temperature: float, norm: LossNorm
    ) -> tuple[float, MetricSet, list[int]]:
        """Gradients of all micro-batches, summed over ranks; on the last stage loss, metrics and broken rows."""
        metrics, broken, losses = MetricSet(), [], []

        def loss_of(output: Tensor, part: Part) -> Tensor:
            micro = part.micro
            if not len(micro.index):
                return output.float().sum() * 0.0  # zero, with a graph
            outputs = self.forward.read(output, part, loss_fn.outputs, temperature)
            loss, values = loss_of_rows(loss_fn, outputs, tensors[micro.index].to(self.device), norm)
            metrics.merge(values)
            value = float(loss.detach())
            losses.append(value)
            if not math.isfinite(value):
                broken.extend(micro.index.tolist())
            return (
                loss / self.groups.data.size
            )  # a rank's loss is scaled for the mean over copies; gradients are summed

        self.gradients.clear()
        self.router_loss.spread(sum(work.rows.lengths), self.ranks, self.num_peers)
        self._schedule(self._micro_batches(work), loss_of, forward_only=False)
        self.gradients.finish()
        return sum(losses), metrics, broken

    def _micro_batches(self, work: RankWork) -> list[Part]:
        micro_batches = list(work.micro_batches(self.device))
        if self.sizes.virtual:  # the interleaved schedule needs a multiple of the stages
            micro_batches += [MicroBatch.filler(self.device)] * (-len(micro_batches) % self.sizes.pipeline)
        return [self.forward.part(micro) for micro in micro_batches]

    def _schedule(self, micro_batches: list[Part], loss_of: Any, forward_only: bool, noted: Any = None) -> None:
        """Megatron-Core's schedule: no pipeline, 1F1B, or interleaved; ``noted`` is called when a stage has run."""
        if not micro_batches:
            return
        run = import_megatron("pipeline_parallel").get_forward_backward_func()
        chunks = list(self.model.chunks)

        def step(waiting: Iterator[Part], stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], LossOfPart]]:
            part = next(waiting)

            def loss(output: Tensor) -> LossOfPart:
                return loss_of(output, part), torch.zeros((), dtype=torch.int), {}

            output = self.forward.run(stage, part)
            if noted is not None:
                noted(stage, part)
            return output, loss

        waiting = [iter(micro_batches) for _ in chunks]
        run(
            forward_step_func=step,
            data_iterator=waiting if len(chunks) > 1 else waiting[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # every stage tells the next one its shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        return self.gradients.norm()

    def _merged(self, total: float, metrics: MetricSet) -> tuple[float, MetricSet]:
        """The numbers of the ranks that computed a loss: one per copy of the model."""
        return merge_metrics(total, metrics, self.ranks, counted=self.groups.heads)

    # ---- weights -----------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.export_weights`, gathered layer by layer from the ranks that hold parts; an adapter is merged."""
        self.onload(optimizer=False)
        yield from self._gathered(self.table, self._weight)
        self.offload(params=self.idle["params"], optimizer=False)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        assert self.adapters is not None, "all weights of this model are trained"
        self.onload(optimizer=False)
        yield from self._gathered(self.trainable, self._trained)
        self.offload(params=self.idle["params"], optimizer=False)

    def without_adapter(self) -> AbstractContextManager[None]:
        assert self.adapters is not None, "this model has no adapter that could be switched off"
        return self.adapters.off()

    def _weight(self, name: str) -> Tensor:
        """This rank's part of a weight of the full model."""
        weight = self.table.piece(name, lambda parameter: parameter)
        return weight if self.adapters is None else self.adapters.merged(name, weight)

    def _trained(self, name: str) -> Tensor:
        """This rank's part of a weight that is trained."""
        return self.trainable.piece(name, lambda parameter: parameter)

    def _gathered(self, table: WeightTable, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """All weights of a table, complete on every rank."""
        plan = make_plan(table.model, self.sizes.layout, Layout(data=self.ranks.size))
        resharder = Resharder(plan, self.ranks.rank, dtype=self.dtype, dtypes=table.dtypes, device=self.device)
        yield from table.on_disk((name, tensor.detach()) for name, tensor in resharder.run(piece))

    def _weight_boxes(self) -> dict[str, tuple[ShardSpec, Tensor]]:
        return self._boxes(self.table, self._weight)

    def _boxes_in_memory(self) -> dict[str, tuple[ShardSpec, Tensor]]:
        tables = {"": self.table} if self.adapters is None else {"": self.table, "adapter/": self.trainable}
        return {
            before + name: table.box(name, table.piece(name, lambda parameter: parameter))
            for before, table in tables.items()
            for name, _ in table.dtypes_here(self.dtype)
        }

    def _merged_weights(self) -> WeightsToWrite:
        return weights_to_write(self._weight_boxes(), self.ranks, self.table.as_on_disk)

    def _state_weights(self) -> WeightsToWrite:
        if self.adapters is None:
            return self._merged_weights()
        boxes = self._boxes(self.trainable, self._trained)
        return weights_to_write(boxes, self.ranks, self.trainable.as_on_disk, in_one_file=True)

    def _boxes(self, table: WeightTable, piece: Piece) -> dict[str, tuple[ShardSpec, Tensor]]:
        """This rank's parts, under Hugging Face names and in the dtype in which they are exported."""
        boxes = {}
        for name, dtype in table.dtypes_here(self.dtype):
            boxes[name] = table.box(name, piece(name).to(dtype))
        return boxes

    def _fill(self, weights: dict[str, Tensor]) -> None:
        def check() -> tuple[None, None]:
            check_given(self.trainable.disk_shapes, weights)
            return None, None

        self.ranks.together(check)
        bound = {name: b for b in self.trainable.bound for name in b.slot.theirs}
        parts: dict[str, dict[str, Tensor]] = {}
        self.onload(optimizer=False)
        for name in self.trainable.disk_shapes:
            local_parts = self.trainable.parts(name, self._whole(weights[name]))
            for part, values in ((part, values) for part, values in local_parts.items() if part in bound):
                b = bound[part]
                have = parts.setdefault(b.slot.ours, {})
                have[part] = values
                if len(have) == len(b.slot.theirs):
                    ready = parts.pop(b.slot.ours)
                    self._put(b, lambda name, axis, low, high: ready[name].narrow(axis, low, high - low))  # noqa: B023

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """As `Engine.load_weights`; rank 0's weights count, the others may pass the same ones or none."""
        items = weights.items() if isinstance(weights, Mapping) else weights
        tensors = {name: tensor.cpu() if self.is_first else tensor.to("meta") for name, tensor in items}
        self._fill(distributed.shards.mirror(tensors, self.ranks))

    def _take_saved(self, saved: StateSection) -> None:
        """Read this rank's parts of a checkpoint's weights."""

        def check() -> tuple[None, None]:
            check_given(self.trainable.disk_shapes, saved.blank())
            return None, None

        self.ranks.together(check)
        self.onload(optimizer=False)
        for bound in self.trainable.bound:
            self._put(bound, partial(self.trainable.read_saved, saved))

    @torch.no_grad()
    def _put(self, bound: Any, read: Read) -> None:
        self.table.put(bound, bound.parameter, read)
        master = self.gradients.masters.get(bound.parameter) if hasattr(self, "gradients") else None
        if master is not None and master is not bound.parameter:
            self.table.put(bound, master, read)

    def _whole(self, tensor: Tensor) -> Tensor:
        """Rank 0's values, on every rank."""
        if self.ranks.size == 1:
            return tensor
        values = tensor.contiguous() if self.is_first else torch.empty(tensor.shape, dtype=tensor.dtype)
        return self.ranks.broadcast(values)

    def _optimizer_boxes(self) -> tuple[dict[str, tuple[ShardSpec, Tensor]], dict[str, Any]]:
        names = {} if self.adapters is None else self.adapters.names
        boxes = {f"{names.get(name, name)}/{key}": box for name, key, box in self.stepper.boxes()}
        return boxes, self.stepper.scalars()

    def _load_optimizer_state(self, saved: StateSection, scalars: Mapping[str, Any]) -> None:
        self.stepper.load(saved, scalars, {} if self.adapters is None else self.adapters.names)

    # ---- host and device ---------------------------------------------------------------------------------------

    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        self._move({self.device: "cpu"}, "cpu", params, optimizer)

    def onload(self, params: bool = True, optimizer: bool = True) -> None:
        self._move({"cpu": self.device}, self.device, params, optimizer)

    def _move(self, moves: dict[str, str], to: str, params: bool, optimizer: bool) -> None:
        if self.device == "cpu" or not hasattr(self, "gradients"):
            return
        if params:
            if to == "cpu":
                self.gradients.clear()  # the next step begins without them anyway
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(to, non_blocking=True)
        if optimizer and self.optimizer is not None:
            for parameter, master in self.gradients.masters.items():
                if master is not parameter:
                    master.data = master.data.to(to, non_blocking=True)
            move_optimizer_state(self.optimizer, moves)


def _detached(blueprint: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(blueprint).items()}


def _new_head(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """As `load_value_model` draws it."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / (shape[-1] + 1)
