"""What every engine over a torch module does: the iteration, the schedule, the state.

A backend adds how the module is laid out over ranks and how weights go in and out; the numbers are decided here, once.
On several ranks each gets its rows of a batch, and a result is that of all rows: the denominators of the loss and the
gradient norm are the mini-batch's, empty micro-batches let all ranks enter the same collectives, and metrics are equal.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from verl.algorithms.aggregation import LossNorm, loss_norm
from verl.algorithms.kl import Measure, full_kl
from verl.algorithms.losses import LossFn, known_slopes, loss_of_rows, mean_weight, shares_of
from verl.algorithms.schedules import build_schedule
from verl.checkpoint.files import FileRecord
from verl.checkpoint.part import prepare_weights, write_hf
from verl.checkpoint.state import EngineState, StateSection, prefixed
from verl.checkpoint.tensors import write_tensors
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.schema.node import key_of
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.device import torch_dtype
from verl.distributed import Ranks
from verl.distributed.boxes import written_once
from verl.distributed.copies import compare_copies
from verl.distributed.metrics import merge_metrics
from verl.engines import memory
from verl.engines.activations import host_activations
from verl.engines.adapters import adapter_writer
from verl.engines.base import Engine, HFWriter
from verl.engines.blank_pictures import Blanks
from verl.engines.forward import TokenForward, zeros_of
from verl.engines.gradient_rows import GradientRows
from verl.engines.loss_scale import LossScale
from verl.engines.micro_batch import plan_padded, plan_together
from verl.engines.muon import build_for_model
from verl.engines.optimizer import copied, load_optimizer_state, optimizer_state
from verl.engines.packing import plan_packed, plan_packed_together
from verl.engines.rank_work import RankWork
from verl.engines.recorded_experts import RecordedExperts, check_experts
from verl.engines.rng import gather_rng_state, restore_rng_state
from verl.engines.rows import AlignedRows, MicroBatch
from verl.engines.saving import WeightsToWrite, held, weights_to_write
from verl.engines.seen_rows import entry_tensors
from verl.engines.settings import PassSettings, check_settings, compute_dtype, recompute_activations
from verl.engines.step import StepReport, clip_and_step, tell_broken_rows
from verl.errors import CheckpointError, EngineError, ModelError
from verl.metrics import MetricSet, notice
from verl.models import count_parameters, hf_folder, load_causal_lm, load_value_model, lora, nf4
from verl.models.compiled import compile_layers
from verl.models.flops import ModelFlops
from verl.models.kernels import apply_kernels
from verl.models.loading import value_head
from verl.models.router_replay import COLUMN
from verl.models.routers import RouterStatistics
from verl.models.tiled_mlp import tile_mlps
from verl.models.vision import family_of, freeze_tower, tower_flops, tower_modules
from verl.models.weights import named_tensors, names_on_disk
from verl.planner.engines import automatic_tokens
from verl.protocol import DataProto
from verl.protocol.sharding import ShardSpec
from verl.protocol.tokenizer import Tokenizer

T = TypeVar("T")
LOADERS = {"causal_lm": load_causal_lm, "value": load_value_model}


class TorchEngine(Engine):
    """See the backends for the arguments."""

    ranks: Ranks
    num_peers: int = 1
    """Ranks that hold the same rows as this one, itself included."""
    scales_loss: bool = True
    """Whether it trains in float16."""
    skips_constant_rows: bool = True
    """Whether rows without a gradient of the loss need no pass; a router's z-loss has one of every row."""
    model: Any
    architecture: str

    def __init__(
        self,
        model: HFModelConfig,
        engine: FSDPEngineConfig | TorchTitanEngineConfig,
        optim: OptimizerConfig | None = None,
        *,
        kind: str = "causal_lm",
        grad_clip: float | None = 1.0,
        total_training_steps: int = 1,
        device: str = "cpu",
        seed: int | None = None,
        passes: PassSettings | None = None,
        freeze_vision_tower: bool = False,
    ):
        self._introduce(model, engine, kind, grad_clip, device)
        self.freezes_tower = freeze_vision_tower
        check_settings(engine, trains=optim is not None, device=device, scales_loss=self.scales_loss)
        self.ranks = self._join()
        self.model = self._build(model, engine, engine.seed if seed is None else seed)
        self.blueprint = getattr(self, "blueprint", self.model)
        self.forward = self._make_forward(
            self.model, kind, device, self._autocast_dtype(), passes or PassSettings.of(model, engine)
        )
        self._after_passes()  # it has tried out what the model can do
        if self._wants_compiling(engine):
            compile_layers(self.model)
        self.routers = RouterStatistics(self.model)
        self.activations = host_activations(
            model.enable_activation_offload and optim is not None,
            self.blueprint.parameters(),
            device,
            key_of(model, "enable_activation_offload"),
        )
        self.optimizer = self.scheduler = None
        if optim is not None:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = self._build_optimizer(parameters, optim)
            self.scheduler = build_schedule(self.optimizer, optim, total_training_steps)

    def _introduce(self, model: Any, engine: Any, kind: str, grad_clip: float | None, device: str) -> None:
        """What every engine knows before it has a model."""
        if kind not in LOADERS:
            raise EngineError("unknown kind of model", got=kind, allowed=LOADERS)
        self.kind, self.device, self.grad_clip, self.path = kind, device, grad_clip, model.path
        self.idle = {"params": engine.param_offload, "optimizer": engine.optimizer_offload}
        for name in ("param_offload", "optimizer_offload"):
            if engine[name] and device == "cpu":
                notice(key_of(engine, name), "has no effect on a CPU: host memory is where everything is")
        self.dtype = compute_dtype(engine.dtype, device)
        self.loss_scale = LossScale(self.dtype if self.scales_loss else torch.float32)

    # ---- what a backend provides -------------------------------------------------------------------------------

    @abstractmethod
    def _build(self, model: Any, engine: Any, seed: int) -> nn.Module:
        """The module with its weights, laid out as the backend wants it; sets ``architecture``."""

    @abstractmethod
    def _fill(self, weights: dict[str, Tensor]) -> None:
        """Take over weights under Hugging Face names; values on rank 0, names and shapes everywhere."""

    def _join(self) -> Ranks:
        """The ranks that hold this model together."""
        return Ranks()

    def _autocast_dtype(self) -> torch.dtype:
        return self.dtype

    def _make_forward(self, *args: Any, **kwargs: Any) -> TokenForward:
        """What runs the model on a micro-batch; arguments of `TokenForward`."""
        return TokenForward(*args, **kwargs)

    def _wants_compiling(self, engine: Any) -> bool:
        """Whether the transformer layers are compiled."""
        return False

    def _build_optimizer(self, parameters: list[nn.Parameter], optim: OptimizerConfig) -> torch.optim.Optimizer:
        return build_for_model(self.model, self.kind, parameters, optim, self.device)

    def _box(self, tensor: Tensor, name: str) -> tuple[ShardSpec, Tensor]:
        """This rank's box of a weight, or of something that is laid out like the weight of this name."""
        return ShardSpec.of(tensor), tensor.detach()

    def _optimizer_boxes(self) -> tuple[dict[str, tuple[ShardSpec, Tensor]], dict[str, Any]]:
        """As `optimizer_state`, of every tensor what this rank holds."""
        assert self.optimizer is not None, "a frozen engine has no optimizer state"
        named, scalars = optimizer_state(self.optimizer, self._parameter_names())
        return held({full: self._box(t, full.rpartition("/")[0]) for full, t in named.items()}), scalars

    def _load_optimizer_state(self, saved: StateSection, scalars: Mapping[str, Any]) -> None:
        """As `load_optimizer_state`."""
        assert self.optimizer is not None, "a frozen engine has no optimizer state"
        load_optimizer_state(self.optimizer, self._parameter_names(), saved, scalars, self._placed)

    def _placed(self, saved: StateSection, name: str, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """A saved optimizer tensor as this rank's optimizer keeps it."""
        return copied(saved, name, parameter, device)

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        """L2 norm over all shards."""
        return torch.nn.utils.get_total_norm(grads)

    def _merged(self, total: float, metrics: MetricSet) -> tuple[float, MetricSet]:
        """Loss and metrics of all ranks, which all then have."""
        return merge_metrics(total, metrics, self.ranks, self.num_peers)

    def _before_micro_batch(self, last: bool) -> None:
        """Called in front of each forward pass of an optimizer step."""

    def _after_passes(self) -> None:
        """Called when the last forward pass of a batch is over."""

    @property
    def is_first(self) -> bool:
        return self.ranks.is_first

    def together(self, work: Callable[[], T]) -> T:
        return self.ranks.together(lambda: (work(), None))[0]

    def only_first(self, work: Callable[[], T]) -> T | None:
        return self.ranks.only_first(work)

    # ---- passes ------------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model)

    def train_flops(self, lengths: Sequence[int]) -> float:
        return ModelFlops.of(self.model.config, self.num_parameters).train(lengths)

    def tower_flops(self, column: Iterable[Any]) -> float:
        """As for tokens, a picture counts once for each row that shows it; a frozen tower has no backward pass."""
        family = self.forward.family
        if family is None:
            return 0.0
        pictures = [picture for inputs in column for picture in family.pictures(entry_tensors(inputs))]
        trains = any(p.requires_grad for _, part in tower_modules(self.model, family) for p in part.parameters())
        return tower_flops(self.model, family, pictures) * (3 if trains else 1)

    def infer(
        self,
        batch: DataProto,
        outputs: tuple[str, ...] = ("log_probs",),
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Tensor]:
        work = self._prepare("infer", batch, outputs, temperature, micro_batch_size, max_tokens)
        self.onload(optimizer=False)
        self.model.eval()
        rows, most = work.rows, self.forward.listed_per_token
        results = {n: zeros_of(n, rows.mask.shape, rows.candidates, most) for n in outputs if n != COLUMN}
        experts = RecordedExperts(batch)
        with torch.no_grad(), self._reference_at_hand(outputs), self._replaying():
            for index, computed in self._passes(work, outputs, temperature):
                experts.add(index, computed.pop(COLUMN, None))
                for name, values in computed.items():
                    results[name][index] = values.cpu()
        if COLUMN in outputs:
            results[COLUMN] = experts.column()
        self._after_passes()
        self.offload(**self.idle)
        return results

    def _passes(
        self, work: RankWork, outputs: Sequence[str], temperature: float
    ) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        """Rows and what `forward` finds for them, micro-batch by micro-batch."""
        for micro in work.micro_batches(self.device):
            with memory.explained(micro):
                computed = self.forward(micro, outputs, temperature)
            yield micro.index, computed

    def train_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ) -> MetricSet:
        if self.optimizer is None:
            raise EngineError("this engine is frozen: it was made without an optimizer")
        # A loss need not have the attribute: most look at one row at a time.
        together = int(getattr(loss_fn, "rows_together", 1))
        split = GradientRows.of(batch, loss_fn, self.ranks) if self.skips_constant_rows else GradientRows(batch)
        limits = micro_batch_size, max_tokens, together
        work = self._prepare("train_batch", split.trained, loss_fn.outputs, temperature, *limits, least=1)
        self.onload()
        self.model.train()
        tensors: Any = split.trained.batch
        mask, count = batch.tensors["response_mask"].cpu(), lambda number: self.ranks.sum(number) / self.num_peers
        norm = loss_norm(mask, self.ranks.size // self.num_peers, work.num_responses, count, shares_of(batch.tensors))
        if norm.num_tokens == 0:
            return StepReport(0.0, float(self.optimizer.param_groups[0]["lr"]), skipped_empty=True).metrics(0.0)
        mean = mean_weight(loss_fn, lambda: self._log_probs(work, tensors, temperature), self.ranks.sum)
        norm = replace(norm, mean_weight=mean)
        with self.routers.watching(), self._reference_at_hand(loss_fn.outputs), self._replaying():
            total, metrics, broken = self._accumulate(work, tensors, loss_fn, temperature, norm)
        self._after_passes()
        rest, measured = split.rest(loss_fn, norm)
        total, metrics = total + rest, metrics.merge(measured)
        metrics.add("without_gradient", split.share)
        if work.rows.experts is not None and self.forward.routing is not None:
            metrics.merge(self.forward.routing.differing.metrics(self.ranks.sum))
        metrics.merge(self.routers.metrics(self.ranks.sum)).merge(work.waste(self.ranks.sum))
        report = clip_and_step(
            self.optimizer, self.model.parameters(), self.grad_clip, self._total_norm, self.loss_scale
        )
        if report.skipped_nonfinite or report.skipped_overflow:
            tell_broken_rows(split.trained, broken)
        total, metrics = self._merged(total, metrics)
        return metrics.merge(report.metrics(total))

    def _log_probs(self, work: RankWork, tensors: Any, temperature: float) -> Iterator[tuple[Tensor, Any]]:
        """Log-probs before an optimizer step, without gradient, and their rows, micro-batch by micro-batch."""
        self.model.eval()
        with torch.no_grad(), self._replaying():
            for index, computed in self._passes(work, ("log_probs",), temperature):
                yield computed["log_probs"], tensors[index].to(self.device)
        self._after_passes()
        self.model.train()

    def _accumulate(
        self, work: RankWork, tensors: Any, loss_fn: LossFn, temperature: float, norm: LossNorm
    ) -> tuple[float, MetricSet, list[int]]:
        """Gradients of all micro-batches; this rank's share of the loss, its metrics, rows whose loss is not finite."""
        total, metrics, broken = 0.0, MetricSet(), []
        for number, micro in enumerate(work.micro_batches(self.device), start=1):
            self._before_micro_batch(last=number == len(work.plan))
            micro = self._with_slopes(micro, loss_fn, tensors, norm)
            with memory.explained(micro):
                with self.activations.offloaded_activations() if self.activations else nullcontext():
                    outputs = self.forward(micro, loss_fn.outputs, temperature)
                if len(micro.index):
                    loss, measured = loss_of_rows(loss_fn, outputs, tensors[micro.index].to(self.device), norm)
                    metrics.merge(measured)
                else:
                    loss = torch.stack([values.sum() for values in outputs.values()]).sum()  # zero, with a graph
                self.loss_scale.times(loss).backward()
            value = float(loss.detach())
            total += value
            if not math.isfinite(value):
                broken += micro.index.tolist()
        return total, metrics, broken

    def _with_slopes(self, micro: MicroBatch, loss_fn: LossFn, tensors: Any, norm: LossNorm) -> MicroBatch:
        """With the slopes of the loss where it tells them, and the fused head can use them."""
        if not len(micro.index) or getattr(self.forward, "fused", None) is None:
            return micro
        slopes = known_slopes(loss_fn, tensors[micro.index].to(self.device), norm)
        if slopes is None:
            return micro
        return replace(micro, slopes=self.loss_scale.times(slopes.flatten().index_select(0, micro.places)))

    def compare_with(self, reference: Engine, measure: Measure = full_kl) -> None:
        super().compare_with(reference, measure)
        self.forward.reference, self.forward.measure = reference, measure

    def _reference_at_hand(self, outputs: Sequence[str]) -> AbstractContextManager[None]:
        return self.reference.ready() if "full_kl" in outputs else nullcontext()

    def _replaying(self) -> AbstractContextManager[None]:
        """Around passes that may replay recorded experts."""
        return nullcontext() if self.forward.routing is None else self.forward.routing.in_passes()

    @property
    def packs(self) -> bool:
        """Whether a micro-batch may be packed rows."""
        return self.forward.passes.packed

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Within the block `logits` may be called."""
        self.onload(optimizer=False)
        yield
        self._after_passes()
        self.offload(**self.idle)

    @torch.no_grad()
    def logits(self, micro: MicroBatch, temperature: float) -> Tensor:
        """(N, V) float32 over the temperature, in evaluation mode and without gradient. Collective."""
        trains = self.model.training
        self.model.eval()
        try:
            return self.forward.logits(micro, temperature)
        finally:
            self.model.train(trains)

    def _prepare(
        self,
        call: str,
        batch: DataProto,
        outputs: Sequence[str],
        temperature: float,
        micro_batch_size: int | None,
        max_tokens: int | None,
        together: int = 1,
        least: int = 0,
    ) -> RankWork:
        """Align and cut; what is wrong with one rank's rows is an error on every rank, before anyone waits.

        Args:
            least: micro-batches that there are in any case; where no rank has rows, a filler gives gradients of zero.
        """

        def cut() -> tuple[tuple[AlignedRows, list[list[int]]], dict[str, Any]]:
            self.forward.check(outputs, temperature)
            rows = AlignedRows.of(batch, self.forward.routing is not None, self.forward.family)
            if self.forward.routing is not None:
                check_experts(rows.experts, self.forward.routing)
            plan = self._plan(
                rows, micro_batch_size, self._budget(rows, micro_batch_size, max_tokens, together), together
            )
            facts = {"call": [call, list(outputs), temperature], "cut": [len(plan), rows.mask.shape[1]]}
            facts["kinds"] = [] if rows.seen is None else rows.seen.kinds
            return (rows, plan), facts

        (rows, plan), facts = self.ranks.together(cut)
        self.ranks.agree("what to compute", [fact["call"] for fact in facts])
        count, num_responses = (max(fact["cut"][i] for fact in facts) for i in range(2))
        count = max(count, least)
        kinds = {kind for fact in facts for kind in fact["kinds"]} if self.ranks.size > 1 else ()
        blanks = Blanks(self.forward.family, tuple(sorted(kinds)))
        return RankWork(rows, plan + [[]] * (count - len(plan)), num_responses, self.forward.passes, blanks)

    def _plan(
        self, rows: AlignedRows, micro_batch_size: int | None, max_tokens: int | None, together: int
    ) -> list[list[int]]:
        passes = self.forward.passes
        if together > 1 and passes.packed:
            return plan_packed_together(rows, together, micro_batch_size, max_tokens, passes.share_prompts)
        if together > 1:
            return plan_together(rows.lengths, together, micro_batch_size, max_tokens)
        if passes.packed:
            return plan_packed(rows, micro_batch_size, max_tokens, passes.share_prompts)
        return plan_padded(rows.lengths, micro_batch_size, max_tokens)

    def _budget(
        self, rows: AlignedRows, micro_batch_size: int | None, max_tokens: int | None, together: int = 1
    ) -> int | None:
        if micro_batch_size is None and max_tokens is None:
            longest = together * max(rows.lengths, default=1)
            return automatic_tokens(self.forward.logits_per_token, self.device, longest, self.num_parameters)
        return max_tokens

    def step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        self.offload(**self.idle)

    # ---- state -------------------------------------------------------------------------------------------------

    def hf_writer(self, tokenizer: Tokenizer | None = None) -> HFWriter:
        if lora.has_adapter(self.blueprint):
            return adapter_writer(self.blueprint, self.path, tokenizer)
        return self._model_writer(tokenizer)

    def _model_writer(self, tokenizer: Tokenizer | None) -> HFWriter:
        model, generates = self.model, self.model.can_generate()
        save = partial(
            hf_folder.save_hf_folder,
            config=model.config,
            tokenizer=tokenizer,
            generation_config=model.generation_config if generates else None,
            architecture=self.architecture,
            source=self.path,
        )

        def write(folder: Path, weights: Iterable[tuple[str, Tensor]] | None) -> dict[str, FileRecord]:
            written: list[FileRecord] = []
            save(folder, weights=weights, write_shard=lambda path, shard: written.append(write_tensors(path, shard)))
            return dict(zip(sorted(f.name for f in folder.glob("model*.safetensors")), written))

        return write

    def save_hf(self, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
        state, writer = self._as_state(self._merged_weights(), {}), self._model_writer(tokenizer)
        self.only_first(lambda: prepare_weights(Path(folder)))
        self.ranks.together(lambda: (write_hf(Path(folder), state, writer), None))

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within the block the model is the one that its LoRA adapter was put on."""
        return lora.without_adapter(self.model)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        names = lora.adapter_names(self.blueprint)
        for name, tensor in named_tensors(self.model).items():
            if name in names:
                yield names[name], tensor.detach()

    def _weight_boxes(self) -> dict[str, tuple[ShardSpec, Tensor]]:
        """This rank's boxes of all weights, under their names in memory."""
        return held({name: self._box(tensor, name) for name, tensor in named_tensors(self.model).items()})

    def compare_copies(self) -> int:
        boxes = {f"model/{name}": box for name, box in self._boxes_in_memory().items()}
        if self.optimizer is not None:
            boxes |= {f"optimizer/{name}": box for name, box in self._optimizer_boxes()[0].items()}
        return compare_copies(boxes, self.ranks)

    def _boxes_in_memory(self) -> dict[str, tuple[ShardSpec, Tensor]]:
        """This rank's boxes of all weights and of what is trained beside them, in the dtype in which they are kept."""
        return self._weight_boxes()

    def _merged_weights(self) -> WeightsToWrite:
        """Of all weights those that this rank writes; an adapter is merged."""
        return weights_to_write(self._weight_boxes(), self.ranks, partial(names_on_disk, self.blueprint))

    def _state_weights(self) -> WeightsToWrite:
        """What this rank writes of the model: of its weights, or of what is trained of a model with an adapter."""
        if not lora.has_adapter(self.blueprint):
            return self._merged_weights()
        names = lora.adapter_names(self.blueprint)
        boxes = {name: box for name, box in self._weight_boxes().items() if name in names}
        return weights_to_write(boxes, self.ranks, lambda d: {names[n]: t for n, t in d.items()}, in_one_file=True)

    def _as_state(self, weights: WeightsToWrite, scalars: dict[str, Any]) -> EngineState:
        """A state of this rank that holds its weights."""
        tensors, fresh = prefixed("model", weights.tensors), frozenset(f"model/{name}" for name in weights.fresh)
        return EngineState(tensors, scalars, {}, self.ranks.rank, self.ranks.size, weights.files, fresh)

    def state(self) -> EngineState:
        scalars: dict[str, Any] = {
            "model": {"architecture": self.architecture, **nf4.record_of(self.model)},
            "extra": {"scheduler_step": 0 if self.scheduler is None else self.scheduler.last_epoch},
        }
        state = self._as_state(self._state_weights(), scalars)
        tensors, shards = dict(state.tensors), {}
        tensors |= prefixed("extra", gather_rng_state(self.device, self.ranks))
        if self.optimizer is not None:
            boxes, scalars["optimizer"] = self._optimizer_boxes()
            scalars["extra"] |= self.loss_scale.state()
            for name, (spec, tensor) in written_once(boxes, self.ranks).items():
                tensors[f"optimizer/{name}"], shards[f"optimizer/{name}"] = tensor, spec
        return replace(state, tensors=tensors, shards=shards)

    def load_state(self, state: EngineState) -> None:
        self.ranks.agree("which state to load", self.ranks.exchange(sorted(state.scalars)))
        if "model" in state.scalars:
            self._load_model_state(state)
        if "optimizer" in state.scalars and self.optimizer is not None:
            self._load_optimizer_state(state.section("optimizer"), state.scalars["optimizer"])
        if "extra" in state.scalars:
            self._set_schedule(int(state.scalars["extra"]["scheduler_step"]))
            self.loss_scale.load(state.scalars["extra"])
            restore_rng_state(state.section("extra"), self.device, self.ranks)

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        self._fill(dict(weights))

    def _load(self, model: Any, engine: Any, seed: int, device: str = "cpu") -> Any:
        """The model of the ``model`` section on the host, or without values on ``meta``."""
        loaded: Any = LOADERS[self.kind](
            model.path,
            dtype=torch_dtype(engine.model_dtype),
            override_config=dict(model.override_config or {}),
            trust_remote_code=model.trust_remote_code,
            external_lib=model.external_lib,
            hf_config_path=model.hf_config_path,
            seed=seed,
            device=device,
        )
        self.architecture = type(loaded).__name__
        apply_kernels(
            loaded, self.device, use_liger=model.use_liger, compiles=engine.use_torch_compile, is_alone=self.is_alone
        )
        tiled, num_tiles = model.tiled_mlp.enabled, model.tiled_mlp.num_shards
        if tiled:
            tile_mlps(loaded, num_tiles)
        adapter = lora.LoraSettings.of(model)
        family = family_of(loaded.config)
        if self.freezes_tower and family is not None:
            freeze_tower(loaded, family)
        if adapter is not None:
            lora.add_adapter(loaded, adapter, seed, also=value_head(loaded) if self.kind == "value" else None)
        if recompute_activations(model.enable_gradient_checkpointing, self.device):
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # not every version has the new name
                loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return loaded

    def _parameter_names(self) -> dict[Any, str]:
        return {tensor: name for name, tensor in named_tensors(self.model).items()}

    def _load_model_state(self, state: EngineState) -> None:
        saved = state.scalars["model"]["architecture"]
        if saved != self.architecture:
            raise CheckpointError("the checkpoint holds another architecture", got=saved, allowed=self.architecture)
        nf4.check_record(state.scalars["model"], self.model)
        try:
            self._take_saved(state.section("model"))
        except ModelError as error:
            raise CheckpointError(f"the checkpoint's weights do not fit this model: {error}") from error

    def _take_saved(self, saved: StateSection) -> None:
        """Take over the weights of a checkpoint."""
        self._fill(dict(saved))

    def _set_schedule(self, step: int) -> None:
        """Put the learning rate where it was after ``step`` global steps; LambdaLR has no call for that."""
        if self.scheduler is None or self.optimizer is None:
            return
        self.scheduler.last_epoch = step
        rates = [base * factor(step) for base, factor in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)]
        for group, rate in zip(self.optimizer.param_groups, rates):
            # torchao's optimizers keep theirs in a tensor.
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
