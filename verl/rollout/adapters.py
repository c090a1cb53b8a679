"""Whether a LoRA adapter goes to the sampler alone: a few megabytes, where the merged weights are the whole model."""

from __future__ import annotations

from verl.config.machine.config_json import adapter_on_experts, experts_of, facts_of
from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.metrics import notice
from verl.models.lora import LoraSettings, config_of
from verl.registry import SAMPLERS

KEY = "actor_rollout_ref.model.lora.merge"


def separate_adapter(rollout: RolloutConfig, model: HFModelConfig) -> LoraSettings | None:
    """The adapter whose factors are all that is sent; None where all weights are, with an adapter merged into them.

    Both ends call this, so that they agree. If the sampler cannot take an adapter, a notice says so.

    Args:
        rollout, model: sections of the configuration.
    """
    merge, settings = model.lora.merge, LoraSettings.of(model)
    if merge or settings is None:
        return None
    if model.lora_base_quantization is not None:
        reason = "the sampler needs the base's rounded weights, too"
    elif rollout.checkpoint_engine.backend.startswith("delta"):
        reason = "differences are those of whole weights"
    elif rollout.name != "hf" and _on_experts(model, settings):
        reason = "it adapts experts, and the sampler applies adapters to linear layers alone"
    else:
        reason = SAMPLERS.get(rollout.name).why_adapter_is_merged(rollout)
    if reason:
        notice(KEY, f"the adapter is merged into the weights before they go to the sampler all the same: {reason}")
        return None
    return settings


def _on_experts(model: HFModelConfig, settings: LoraSettings) -> bool:
    """Whether an adapter changes weights outside linear modules, which peft's files hold for all experts at once."""
    if settings.adapter_path or settings.target_parameters:
        return bool(config_of(settings).target_parameters)
    return adapter_on_experts(model) is not None and experts_of(facts_of(model.path) or {}) is not None
