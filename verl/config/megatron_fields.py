"""Fields of Megatron-Core's TransformerConfig that a run replaces, and what becomes of each.

Most are handed on as they are, under ``override_transformer_config`` or ``override_mcore_model_config``; Megatron-Core
judges their names and values. Here stand those that the engine decides itself, and those that are no fields of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.config.checks import Problems
from verl.errors import ConfigError
from verl.metrics import notice

_SIZES = "parallel sizes have settings of their own"
_ROUTERS = "load-balancing losses are no part of any engine's loss; moe/load_balance shows how evenly experts are used"
_STAGES = "every stage of a pipeline has as many layers"
_LOSS = "the loss carries its own denominators"


def _size(name: str) -> Callable[[Any, Any], bool]:
    return lambda section, value: section.get(name, 1) == value


def _is(*values: Any) -> Callable[[Any, Any], bool]:
    return lambda section, value: value in values


DECIDED: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "tensor_model_parallel_size": (_SIZES, _size("tensor_model_parallel_size")),
    "pipeline_model_parallel_size": (_SIZES, _size("pipeline_model_parallel_size")),
    "virtual_pipeline_model_parallel_size": (_SIZES, _size("virtual_pipeline_model_parallel_size")),
    "expert_model_parallel_size": (_SIZES, _size("expert_model_parallel_size")),
    "expert_tensor_parallel_size": (_SIZES, _size("expert_tensor_parallel_size")),
    "context_parallel_size": (_SIZES, _size("context_parallel_size")),
    "sequence_parallel": (_SIZES, _size("sequence_parallel")),
    "moe_router_load_balancing_type": (_ROUTERS, _is("none")),
    "calculate_per_token_loss": (_LOSS, _is(True)),
    "num_layers_in_first_pipeline_stage": (_STAGES, _is(None)),
    "num_layers_in_last_pipeline_stage": (_STAGES, _is(None)),
    "pipeline_model_parallel_layout": (_STAGES, _is(None)),
    "account_for_embedding_in_pipeline_split": (_STAGES, _is(False)),
    "account_for_loss_in_pipeline_split": (_STAGES, _is(False)),
    "variable_seq_lengths": ("every micro-batch is as long as its longest row", _is(True)),
}
"""Fields that may not be replaced: why, and whether a value is what the engine takes anyway."""

_ASCEND = "only MindSpeed, which runs on Ascend, reads it"
_MODEL = "the model's own config.json says it"
IDLE: dict[str, str] = {
    "moe_aux_loss_coeff": _ROUTERS,
    "use_distributed_optimizer": "a setting of that name stands beside this section",
    "seq_length": "every micro-batch is as long as its longest row",
    "multi_head_latent_attention": _MODEL,
    "swiglu": _MODEL,
    **{f"rope_scaling_{name}": _MODEL for name in ("type", "mscale", "mscale_all_dim")},
    "yarn_scaling_factor": _MODEL,
    "swap_optimizer": _ASCEND,
    "context_parallel_algo": _ASCEND,
    "apply_dsa_kernel_fusion": _ASCEND,
    "use_arbitrary_attention_mask": _ASCEND,
    "use_flash_attn": _ASCEND,
    "use_naive_l2norm": _ASCEND,
    **{
        f"use_fused_{name}": _ASCEND for name in ("mhc", "ring_attention_update", "rmsnorm", "rotary_pos_emb", "swiglu")
    },
}
"""Names that change nothing, and why."""

KERNELS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "fp8_recipe",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_enable_deepep",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_shared_expert_overlap",
    "persist_layer_norm",
)
"""Fields that choose kernels of Transformer Engine: without it they are said, and not handed on."""


def problems(key: str, section: Any) -> Problems:
    """Fields that the engine decides otherwise; one notice for those that change nothing.

    Args:
        key: of ``override_mcore_model_config``, for messages.
        section: the ``megatron`` section.
    """
    fields = section.override_mcore_model_config
    wrong = [
        ConfigError(
            f"this field of Megatron-Core is decided by the engine: {why}",
            key=f"{key}.{name}",
            got=fields[name],
            fix="Leave it out.",
        )
        for name, (why, agrees) in DECIDED.items()
        if name in fields and not agrees(section, fields[name])
    ]
    idle: dict[str, list[str]] = {}
    for name in fields:
        if name in IDLE:
            idle.setdefault(IDLE[name], []).append(name)
    if idle:
        said = "; ".join(f"{', '.join(names)} ({why})" for why, names in idle.items())
        notice(key, f"these fields have no effect: {said}")
    return wrong


def refuse_fp8(key: str, section: Any) -> None:
    """Raise `ConfigError` for matrix products in FP8, where Transformer Engine is not installed."""
    value = section.override_mcore_model_config.get("fp8")
    if value not in (None, False):
        fix = "Leave it out, or install transformer-engine."
        raise ConfigError("products in FP8 need Transformer Engine", key=f"{key}.fp8", got=value, fix=fix)


def handed_on(section: Any) -> Mapping[str, Any]:
    """The fields that Megatron-Core gets."""
    fields = section.override_mcore_model_config
    return {name: value for name, value in fields.items() if name not in IDLE and name not in DECIDED}
