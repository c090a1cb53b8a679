"""The plain engine: one model on one device, and the reference that every other backend is tested against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from verl.engines.optimizer import move_optimizer_state
from verl.engines.saving import WeightsToWrite
from verl.engines.settings import tell_sharding_settings
from verl.engines.torch_engine import TorchEngine
from verl.errors import ModelError
from verl.metrics import notice
from verl.models import export_weights, load_weights, lora
from verl.models.compiled import wants_compiling
from verl.models.loading import HOLLOW
from verl.models.nf4 import is_quantized, quantize_frozen
from verl.models.stored import fill_quantized, stored_weights


class PlainEngine(TorchEngine):
    """A full model on one device, float32 or bf16 autocast over float32 weights.

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
        freeze_vision_tower: train everything but the tower of a model that sees.

    Raises:
        ModelError: the path is not a usable model.
        ConfigError: an optimizer or schedule that does not exist.
    """

    is_alone = True

    def _wants_compiling(self, engine: Any) -> bool:
        return wants_compiling(engine.use_torch_compile, self.device, self.num_parameters)

    def _build(self, model: Any, engine: Any, seed: int) -> nn.Module:
        tell_sharding_settings(engine)
        if model.lora_base_quantization is None:
            return self._load(model, engine, seed).to(self.device)
        return self._load_quantized(model, engine, seed).to(self.device)

    def _load_quantized(self, model: Any, engine: Any, seed: int) -> Any:
        """The model with linear layers in 4 bits; only one layer's weight is there unrounded at a time."""
        built = self._load(model, engine, seed, HOLLOW)
        try:
            with stored_weights(model.path, built) as stored:
                fill_quantized(built, stored)
        except ModelError as error:
            notice(f"model {model.path}", f"it is loaded as a whole before it is rounded to 4 bits: {error}")
            built = self._load(model, engine, seed)
            quantize_frozen(built)
        return built

    def _merged_weights(self) -> WeightsToWrite:
        if not is_quantized(self.model):
            return super()._merged_weights()
        weights = dict(self.export_weights())
        return WeightsToWrite(weights, fresh=frozenset(weights))

    def _fill(self, weights: dict[str, Tensor]) -> None:
        load_weights(self.model, weights)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)

    @property
    def exports_itself(self) -> bool:
        return self.device == "cpu" and not is_quantized(self.model) and not lora.has_adapter(self.model)

    def export_base(self) -> dict[str, Tensor]:
        return {} if self.device != "cpu" or is_quantized(self.model) else lora.base_weights(self.model)

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
