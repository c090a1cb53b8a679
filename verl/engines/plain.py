"""The plain engine: one model on one device, and the reference that every other backend is tested against."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import loss_norm
from verl.algorithms.losses import LossFn
from verl.algorithms.schedules import build_schedule
from verl.checkpoint.state import EngineState, prefixed
from verl.device import torch_dtype
from verl.engines.base import Engine, HFWriter
from verl.engines.forward import TokenForward
from verl.engines.micro_batch import automatic_tokens, plan_padded
from verl.engines.optimizer import (
    build_optimizer,
    load_optimizer_state,
    move_optimizer_state,
    optimizer_state,
)
from verl.engines.rows import AlignedRows, MicroBatch
from verl.engines.settings import check_settings, compute_dtype, recompute_activations
from verl.engines.step import StepReport, clip_and_step
from verl.errors import CheckpointError, EngineError, ModelError
from verl.metrics import MetricSet
from verl.models import count_parameters, export_weights, hf_folder, load_causal_lm, load_value_model, load_weights
from verl.models.flops import ModelFlops
from verl.models.weights import named_tensors
from verl.protocol import DataProto

LOADERS = {"causal_lm": load_causal_lm, "value": load_value_model}


class PlainEngine(Engine):
    """A whole model on one device, float32 or bf16 autocast over float32 weights.

    The model trains in training mode (its dropout, if it has any, is on; then a result does depend on the cut into
    micro-batches) and infers in evaluation mode.

    Args:
        model: the ``model`` section: path, override_config, trust_remote_code, external_lib,
            enable_gradient_checkpointing.
        engine: the ``fsdp_config`` section: model_dtype (parameters), dtype (compute; ``auto`` is float32 on a CPU and
            bf16 elsewhere), full_determinism, param_offload and optimizer_offload (between uses).
        optim: the ``optim`` section; None makes a frozen engine.
        kind: ``causal_lm`` or ``value``.
        grad_clip: largest gradient norm.
        total_training_steps: length of the learning-rate schedule.
        seed: of a new value head; None takes the one of the ``fsdp_config`` section.

    Raises:
        ModelError: the path is not a usable model.
        ConfigError: an optimizer or schedule that does not exist.
    """

    def __init__(
        self,
        model: Any,
        engine: Any,
        optim: Any = None,
        *,
        kind: str = "causal_lm",
        grad_clip: float | None = 1.0,
        total_training_steps: int = 1,
        device: str = "cpu",
        seed: int | None = None,
    ):
        if kind not in LOADERS:
            raise EngineError("unknown kind of model", got=kind, allowed=LOADERS)
        check_settings(engine, trains=optim is not None, device=device)
        self.kind, self.device, self.grad_clip, self.path = kind, device, grad_clip, model.path
        self.idle = {"params": engine.param_offload, "optimizer": engine.optimizer_offload}
        self.model: Any = self._load(model, engine, engine.seed if seed is None else seed)
        self.dtype = compute_dtype(engine.dtype, device)
        self.forward = TokenForward(self.model, kind, device, self.dtype)
        self.optimizer = self.scheduler = None
        if optim is not None:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = build_optimizer(parameters, optim, device)
            self.scheduler = build_schedule(self.optimizer, optim, total_training_steps)

    @property
    def num_parameters(self) -> int:
        return count_parameters(self.model)

    def infer(
        self,
        batch: DataProto,
        outputs: tuple[str, ...] = ("log_probs",),
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Tensor]:
        self.onload(optimizer=False)
        self.model.eval()
        rows = AlignedRows.of(batch)
        results = {name: torch.zeros(rows.mask.shape, dtype=torch.float32) for name in outputs}
        with torch.no_grad():
            for micro in self._micro_batches(rows, micro_batch_size, max_tokens):
                for name, values in self.forward(micro, outputs, temperature).items():
                    results[name][micro.index] = values.cpu()
        self.offload(**self.idle)
        return results

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
        self.onload()
        self.model.train()
        rows, metrics, total = AlignedRows.of(batch), MetricSet(), 0.0
        tensors: Any = batch.batch
        norm = loss_norm(tensors["response_mask"])
        if norm.num_tokens == 0:
            lr = float(self.optimizer.param_groups[0]["lr"])
            return StepReport(0.0, lr, skipped_empty=True).metrics(0.0)
        for micro in self._micro_batches(rows, micro_batch_size, max_tokens):
            outputs = self.forward(micro, loss_fn.outputs, temperature)
            loss, found = loss_fn(outputs, tensors[micro.index].to(self.device), norm)
            loss.backward()
            total += float(loss.detach())
            metrics.merge(found)
        report = clip_and_step(self.optimizer, self.model.parameters(), self.grad_clip)
        return metrics.merge(report.metrics(total))

    def train_flops(self, lengths: Sequence[int]) -> float:
        return ModelFlops.of(self.model.config, self.num_parameters).train(lengths)

    def step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        self.offload(**self.idle)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)

    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        load_weights(self.model, weights)

    def hf_writer(self, tokenizer: Any = None) -> HFWriter:
        def write(folder: Path, weights: Iterable[tuple[str, Tensor]] | None) -> None:
            hf_folder.save(
                folder,
                config=self.model.config,
                weights=weights,
                tokenizer=tokenizer,
                generation_config=self.model.generation_config if self.model.can_generate() else None,
                architecture=type(self.model).__name__,
                source=self.path,
            )

        return write

    def state(self) -> EngineState:
        tensors = prefixed("model", dict(self.export_weights()))
        tensors |= prefixed("extra", _rng_state(self.device))
        scalars: dict[str, Any] = {
            "model": {"architecture": type(self.model).__name__},
            "extra": {"scheduler_step": self.scheduler.last_epoch if self.scheduler is not None else 0},
        }
        if self.optimizer is not None:
            named, scalars["optimizer"] = optimizer_state(self.optimizer, self._parameter_names())
            tensors |= prefixed("optimizer", named)
        return EngineState(tensors, scalars)

    def load_state(self, state: EngineState) -> None:
        if "model" in state.scalars:
            self._load_model_state(state)
        if "optimizer" in state.scalars and self.optimizer is not None:
            load_optimizer_state(
                self.optimizer, self._parameter_names(), state.section("optimizer"), state.scalars["optimizer"]
            )
        if "extra" in state.scalars:
            self._set_schedule(int(state.scalars["extra"]["scheduler_step"]))
            _set_rng_state(state.section("extra"), self.device)

    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        if self.device == "cpu":
            return
        if params:
            self.model.to("cpu")
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, {self.device: "cpu"})

    def onload(self, params: bool = True, optimizer: bool = True) -> None:
        if self.device == "cpu":
            return
        if params:
            self.model.to(self.device)
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, {"cpu": self.device})

    def _load(self, model: Any, engine: Any, seed: int) -> Any:
        loaded: Any = LOADERS[self.kind](
            model.path,
            dtype=torch_dtype(engine.model_dtype),
            override_config=dict(model.override_config or {}),
            trust_remote_code=model.trust_remote_code,
            external_lib=model.external_lib,
            hf_config_path=model.hf_config_path,
            seed=seed,
        )
        if recompute_activations(model.enable_gradient_checkpointing, self.device):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # its new name is not in every version we support
                loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return loaded.to(self.device)

    def _micro_batches(
        self, rows: AlignedRows, micro_batch_size: int | None, max_tokens: int | None
    ) -> Iterator[MicroBatch]:
        if micro_batch_size is None and max_tokens is None:
            max_tokens = automatic_tokens(self.model.config, self.device, max(rows.lengths, default=1), self.kind)
        for index in plan_padded(rows.lengths, micro_batch_size, max_tokens):
            yield rows.micro_batch(index, self.device)

    def _parameter_names(self) -> dict[Any, str]:
        return {tensor: name for name, tensor in named_tensors(self.model).items()}

    def _load_model_state(self, state: EngineState) -> None:
        saved, own = state.scalars["model"]["architecture"], type(self.model).__name__
        if saved != own:
            raise CheckpointError("the checkpoint holds another architecture", got=saved, allowed=own)
        try:
            self.load_weights(state.section("model"))
        except ModelError as error:
            raise CheckpointError(f"the checkpoint's weights do not fit this model: {error}") from error

    def _set_schedule(self, step: int) -> None:
        """Put the learning rate where it was after ``step`` global steps; LambdaLR has no call for that."""
        if self.scheduler is None or self.optimizer is None:
            return
        self.scheduler.last_epoch = step
        rates = [base * factor(step) for base, factor in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)]
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate


def _rng_state(device: str) -> dict[str, Tensor]:
    """torch's global generators: dropout draws from them."""
    found = {"rng/cpu": torch.get_rng_state()}
    if device == "cuda":
        found["rng/cuda"] = torch.cuda.get_rng_state()
    return found


def _set_rng_state(tensors: Mapping[str, Tensor], device: str) -> None:
    torch.set_rng_state(tensors["rng/cpu"])
    if device == "cuda" and "rng/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng/cuda"])
