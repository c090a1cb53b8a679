"""Families as Megatron-Core has them: which of its weights is made of which Hugging Face weights, and its settings.

`verl.engines.megatron` and `verl.models.megatron_conversion` carry it out; nothing here needs Megatron-Core. Weights
are named with ``{layer}`` and ``{expert}``; shapes come from the Hugging Face model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.errors import ConfigError, ModelError, suggest

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WHOLE, ROWS, COLUMNS, QKV, GATED, VOCABULARY = "whole", "rows", "columns", "qkv", "gated", "vocabulary"
HALVES = "halves"


@dataclass(frozen=True)
class Slot:
    """One weight of Megatron-Core.

    Args:
        ours: its name there.
        theirs: the Hugging Face weights it is made of.
        form: how tensor parallelism cuts it. whole: not at all; rows, columns: along the first or second axis; qkv: the
            heads of query, key and value of one KV group lie together; gated: this rank's rows of the first, then
            those of the second; halves: the same of one Hugging Face weight that holds both; vocabulary: rows, filled
            up to a multiple of the ranks.
        partial: each tensor-parallel rank sees only its heads, so its gradient is a part of the whole.
        optional: some models of the family lack it.
        fixed: a float32 buffer that is not trained.
    """

    ours: str
    theirs: tuple[str, ...]
    form: str = WHOLE
    partial: bool = False
    optional: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Family:
    """A model type.

    Args:
        layer: slots of a layer, with ``{layer}``; those of a mixture's experts also have ``{expert}``.
        settings: Hugging Face text configuration -> fields of Megatron-Core's TransformerConfig.
    """

    layer: tuple[Slot, ...]
    settings: Callable[[Any], dict[str, Any]]
    mixture: tuple[Slot, ...] = ()


_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."
_ATTENTION = (
    Slot(f"{_MEGATRON}input_layernorm.weight", (f"{_HF}input_layernorm.weight",)),
    Slot(
        f"{_MEGATRON}self_attention.linear_qkv.weight",
        tuple(f"{_HF}self_attn.{name}_proj.weight" for name in "qkv"),
        QKV,
    ),
    Slot(f"{_MEGATRON}self_attention.linear_proj.weight", (f"{_HF}self_attn.o_proj.weight",), COLUMNS),
    Slot(f"{_MEGATRON}pre_mlp_layernorm.weight", (f"{_HF}post_attention_layernorm.weight",)),
)
_NORMS_BEHIND = (
    *_ATTENTION[:3],
    Slot(f"{_MEGATRON}self_attention.norm_behind.weight", (f"{_HF}post_attention_layernorm.weight",)),
    Slot(f"{_MEGATRON}pre_mlp_layernorm.weight", (f"{_HF}pre_feedforward_layernorm.weight",)),
    Slot(f"{_MEGATRON}mlp.norm_behind.weight", (f"{_HF}post_feedforward_layernorm.weight",)),
)
_GLM_NORMS = (
    *_ATTENTION,
    Slot(f"{_MEGATRON}self_attention.norm_behind.weight", (f"{_HF}post_self_attn_layernorm.weight",)),
    Slot(f"{_MEGATRON}mlp.norm_behind.weight", (f"{_HF}post_mlp_layernorm.weight",)),
)
_QKV_BIAS = (
    Slot(f"{_MEGATRON}self_attention.linear_qkv.bias", tuple(f"{_HF}self_attn.{n}_proj.bias" for n in "qkv"), QKV),
)
_QK_NORM = (
    Slot(f"{_MEGATRON}self_attention.q_layernorm.weight", (f"{_HF}self_attn.q_norm.weight",), partial=True),
    Slot(f"{_MEGATRON}self_attention.k_layernorm.weight", (f"{_HF}self_attn.k_norm.weight",), partial=True),
)
_MLP = (
    Slot(f"{_MEGATRON}mlp.linear_fc1.weight", (f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"), GATED),
    Slot(f"{_MEGATRON}mlp.linear_fc2.weight", (f"{_HF}mlp.down_proj.weight",), COLUMNS),
)
_HALVED_MLP = (Slot(f"{_MEGATRON}mlp.linear_fc1.weight", (f"{_HF}mlp.gate_up_proj.weight",), HALVES), _MLP[1])
_OURS, _THEIRS = f"{_MEGATRON}mlp.experts.local_experts.{{expert}}.", f"{_HF}mlp.experts.{{expert}}."
_EXPERTS = (
    Slot(f"{_MEGATRON}mlp.router.weight", (f"{_HF}mlp.gate.weight",)),
    Slot(f"{_OURS}linear_fc1.weight", (f"{_THEIRS}gate_proj.weight", f"{_THEIRS}up_proj.weight"), GATED),
    Slot(f"{_OURS}linear_fc2.weight", (f"{_THEIRS}down_proj.weight",), COLUMNS),
)
_MIXTRAL = f"{_HF}block_sparse_moe."
_MIXTRAL_EXPERTS = (
    Slot(f"{_MEGATRON}mlp.router.weight", (f"{_MIXTRAL}gate.weight",)),
    Slot(
        f"{_OURS}linear_fc1.weight",
        (f"{_MIXTRAL}experts.{{expert}}.w1.weight", f"{_MIXTRAL}experts.{{expert}}.w3.weight"),
        GATED,
    ),
    Slot(f"{_OURS}linear_fc2.weight", (f"{_MIXTRAL}experts.{{expert}}.w2.weight",), COLUMNS),
)
_SHARED_OURS, _SHARED_THEIRS = f"{_MEGATRON}mlp.shared_experts.", f"{_HF}mlp.shared_experts."
_SHARED_EXPERTS = (
    Slot(f"{_MEGATRON}mlp.router.expert_bias", (f"{_HF}mlp.gate.e_score_correction_bias",), fixed=True),
    Slot(
        f"{_SHARED_OURS}linear_fc1.weight",
        (f"{_SHARED_THEIRS}gate_proj.weight", f"{_SHARED_THEIRS}up_proj.weight"),
        GATED,
    ),
    Slot(f"{_SHARED_OURS}linear_fc2.weight", (f"{_SHARED_THEIRS}down_proj.weight",), COLUMNS),
)


def _latent(ours: str, theirs: str, form: str = WHOLE, optional: bool = False) -> Slot:
    return Slot(
        f"{_MEGATRON}self_attention.{ours}.weight", (f"{_HF}self_attn.{theirs}.weight",), form, optional=optional
    )


_LATENT_ATTENTION = (
    Slot(f"{_MEGATRON}input_layernorm.weight", (f"{_HF}input_layernorm.weight",)),
    _latent("linear_q_proj", "q_proj", ROWS, optional=True),
    _latent("linear_q_down_proj", "q_a_proj", optional=True),
    _latent("q_layernorm", "q_a_layernorm", optional=True),
    _latent("linear_q_up_proj", "q_b_proj", ROWS, optional=True),
    _latent("linear_kv_down_proj", "kv_a_proj_with_mqa"),
    _latent("kv_layernorm", "kv_a_layernorm"),
    _latent("linear_kv_up_proj", "kv_b_proj", ROWS),
    _latent("linear_proj", "o_proj", COLUMNS),
    Slot(f"{_MEGATRON}pre_mlp_layernorm.weight", (f"{_HF}post_attention_layernorm.weight",)),
)
EMBEDDING = Slot("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY)
FINAL_NORM = Slot("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Slot("output_layer.weight", ("lm_head.weight",), VOCABULARY)
VALUE_HEAD = (Slot("output_layer.weight", ("score.weight",)), Slot("output_layer.bias", ("score.bias",)))


_SILU: Mapping[str, Any] = {"silu": F.silu, "swish": F.silu}
_GELU: Mapping[str, Any] = {"gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


def _common(config: PretrainedConfig, activations: Mapping[str, Any] = _SILU) -> dict[str, Any]:
    _refuse(config, "mlp_bias", bool(getattr(config, "mlp_bias", False)))
    name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    _refuse(config, name, getattr(config, name) not in activations)
    _refuse(config, "quantization_config", getattr(config, "quantization_config", None) is not None)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": activations[getattr(config, name)],
    }


def _dense(config: PretrainedConfig, activations: Mapping[str, Any] = _SILU) -> dict[str, Any]:
    _refuse(config, "attention_bias", bool(getattr(config, "attention_bias", False)) and config.model_type == "llama")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**_common(config, activations), **_window(config), "kv_channels": head}


def _window(config: PretrainedConfig) -> dict[str, Any]:
    """How far tokens look back: Hugging Face counts a query's own key, Megatron-Core the keys before it."""
    width, kinds = getattr(config, "sliding_window", None), set(getattr(config, "layer_types", None) or ())
    if width is None or kinds == {"full_attention"}:
        return {}
    if len(kinds) < 2:
        return {"window_size": (width - 1, 0)}
    _refuse(config, "layer_types", not norms_behind(config) or kinds != {"full_attention", "sliding_attention"})
    sliding = [int(kind == "sliding_attention") for kind in config.layer_types]
    return {"window_size": (width - 1, 0), "window_attn_skip_freq": sliding}


def _with_bias(config: PretrainedConfig) -> dict[str, Any]:
    return {**_dense(config), "add_qkv_bias": True}


def _with_qk_norm(config: PretrainedConfig) -> dict[str, Any]:
    _refuse(config, "attention_bias", bool(config.attention_bias))
    return {**_dense(config), "qk_layernorm": True}


def _gemma(config: PretrainedConfig) -> dict[str, Any]:
    """Norms whose weight counts from 1; see `embedding_scale`."""
    _refuse(config, "attention_bias", bool(config.attention_bias))
    _refuse(config, "use_bidirectional_attention", bool(config.use_bidirectional_attention))
    return {**_dense(config, _GELU), "layernorm_zero_centered_gamma": True}


def _gemma2(config: PretrainedConfig) -> dict[str, Any]:
    """Gemma with a scale of its own for the scores; see `norms_behind` and `soft_caps`."""
    return {**_gemma(config), "softmax_scale": config.query_pre_attn_scalar**-0.5}


def _gemma3(config: PretrainedConfig) -> dict[str, Any]:
    """Gemma 2 with norms of queries and keys; see `local_rope_base`."""
    return {**_gemma2(config), "qk_layernorm": True}


def _mixtral(config: PretrainedConfig) -> dict[str, Any]:
    """Every layer has experts: the best k by their logits, weighed by a softmax over those alone."""
    _refuse(config, "router_jitter_noise", config.router_jitter_noise != 0)
    return {
        **_dense(config),
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_layer_freq": [1] * config.num_hidden_layers,
    }


def _mixture(config: PretrainedConfig) -> dict[str, Any]:
    """Softmax over all experts, the best k, and their weights as they are or normalised to 1."""
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    sparse = [int(n not in dense and (n + 1) % step == 0) for n in range(config.num_hidden_layers)]
    return {
        **_with_qk_norm(config),
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": sparse,
        # A softmax over the best k alone is the softmax over all, normalised to 1 over the best k.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


def _deepseek(config: PretrainedConfig) -> dict[str, Any]:
    """Latent attention, and experts beside shared ones."""
    _refuse(config, "attention_bias", bool(config.attention_bias))
    _refuse(config, "rope_interleave", not config.rope_interleave)
    _refuse(config, "num_key_value_heads", config.num_key_value_heads != config.num_attention_heads)
    return {
        **_common(config),
        **_latent_rope(config),
        **_grouped_experts(config),
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_channels": config.v_head_dim,
        "qk_layernorm": True,
    }


def _glm(config: PretrainedConfig) -> dict[str, Any]:
    """Attention of which a part is rotated, pair by pair; see `norms_behind`."""
    return {**_dense(config), "add_qkv_bias": bool(config.attention_bias), "rotary_interleaved": True}


def _glm_mixture(config: PretrainedConfig) -> dict[str, Any]:
    """Attention over heads, of which a part is rotated, and DeepSeek-V3's experts."""
    return {
        **_dense(config),
        **_grouped_experts(config),
        "add_qkv_bias": bool(config.attention_bias),
        "qk_layernorm": bool(config.use_qk_norm),
    }


def _grouped_experts(config: PretrainedConfig) -> dict[str, Any]:
    """Experts by their sigmoid, the best of the best groups, beside shared ones."""
    best, groups, top_groups = config.num_experts_per_tok, config.n_group or 1, config.topk_group or 1
    limited = top_groups < groups
    _refuse(config, "norm_topk_prob", config.norm_topk_prob != (best > 1))
    _refuse(config, "topk_group", limited and best // top_groups != 2)  # a group is as good as its best two experts
    _refuse(config, "n_shared_experts", not config.n_shared_experts)
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": best,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_layer_freq": [int(n >= config.first_k_dense_replace) for n in range(config.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **({"moe_router_num_groups": groups, "moe_router_group_topk": top_groups} if limited else {}),
    }


def _latent_rope(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary positions of latent attention, which Megatron-Core has in its configuration."""
    rope = dict(config.rope_parameters)
    kind, base = rope.get("rope_type", "default"), rope["rope_theta"]
    if kind == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    scales = (rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0)
    odd = {"attention_factor", "truncate"} & {name for name, value in rope.items() if value is not None}
    if kind != "yarn" or odd or bool(scales[0]) != bool(scales[1]):
        raise _unknown_rope(rope, "rope_type default, or yarn with both of mscale and mscale_all_dim or neither")
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope.get("original_max_position_embeddings")
        or config.max_position_embeddings,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": scales[0] or 1.0,
        "mscale_all_dim": scales[1],
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family((*_ATTENTION, *_MLP), _dense),
    "mistral": Family((*_ATTENTION, *_MLP), _dense),
    "qwen2": Family((*_ATTENTION, *_QKV_BIAS, *_MLP), _with_bias),
    "qwen3": Family((*_ATTENTION, *_QK_NORM, *_MLP), _with_qk_norm),
    "qwen3_moe": Family((*_ATTENTION, *_QK_NORM, *_MLP), _mixture, mixture=_EXPERTS),
    "mixtral": Family(_ATTENTION, _mixtral, mixture=_MIXTRAL_EXPERTS),
    "gemma": Family((*_ATTENTION, *_MLP), _gemma),
    "gemma2": Family((*_NORMS_BEHIND, *_MLP), _gemma2),
    "gemma3_text": Family((*_NORMS_BEHIND, *_QK_NORM, *_MLP), _gemma3),
    "glm4": Family((*_GLM_NORMS, *(replace(slot, optional=True) for slot in _QKV_BIAS), *_HALVED_MLP), _glm),
    "glm4_moe": Family(
        (*_ATTENTION, *(replace(slot, optional=True) for slot in (*_QKV_BIAS, *_QK_NORM)), *_MLP),
        _glm_mixture,
        mixture=(*_EXPERTS, *_SHARED_EXPERTS),
    ),
    "deepseek_v3": Family((*_LATENT_ATTENTION, *_MLP), _deepseek, mixture=(*_EXPERTS, *_SHARED_EXPERTS)),
}

REFUSED: Mapping[str, str] = {
    "gpt_oss": "its file holds all experts of a layer as one weight with the gate interleaved, and "
    "packed attention has no sinks",
    "qwen3_next": "Megatron-Core's linear attention (a gated delta net) needs the package flash-linear-attention and "
    "Transformer Engine, and takes no packed rows",
}
"""Families that have no table, and why."""


def megatron_family(config: PretrainedConfig) -> Family:
    """The family of a Hugging Face text configuration.

    Raises:
        ModelError: Megatron-Core training has no table for it.
    """
    if config.model_type not in FAMILIES:
        why = REFUSED.get(config.model_type)
        raise ModelError(
            "Megatron-Core training has no table of weights for this kind of model" + (f": {why}" if why else ""),
            got=config.model_type,
            allowed=FAMILIES,
            fix=(None if why else suggest(config.model_type, FAMILIES))
            or "Use strategy=fsdp2, which trains any transformers model.",
        )
    return FAMILIES[config.model_type]


def slots_of(family: Family, settings: Mapping[str, Any]) -> list[tuple[Slot, tuple[int, ...]]]:
    """The slots of the layers, each with the layers that have it."""
    layers = range(settings["num_layers"])
    sparse = settings.get("moe_layer_freq") or [0] * len(layers)
    mixed = tuple(layer for layer in layers if sparse[layer])
    dense = tuple(layer for layer in layers if not sparse[layer])
    slots = [(slot, dense if slot in _MLP else tuple(layers)) for slot in family.layer]
    return [(slot, where) for slot, where in [*slots, *((slot, mixed) for slot in family.mixture)] if where]


def filled(slot: Slot, layer: int, expert: int) -> Slot:
    """A slot under the names that it has in one layer, for one expert."""

    def name(pattern: str) -> str:
        return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    return replace(slot, ours=name(slot.ours), theirs=tuple(name(pattern) for pattern in slot.theirs))


def fused(form: str, parts: Sequence[Tensor], groups: int) -> Tensor:
    """One weight of Megatron-Core from what it is made of.

    Args:
        parts: full weights, or what a tensor-parallel rank has of each.
        groups: KV groups in them.
    """
    if form == QKV:
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def qkv_part(tensor: Tensor, part: int, groups: int, settings: Mapping[str, Any]) -> Tensor:
    """Query, key or value rows (part 0, 1 or 2) out of a weight in which the heads of a group lie together."""
    dim = settings["kv_channels"]
    queries = settings["num_attention_heads"] // settings["num_query_groups"] * dim
    start, size = ((0, queries), (queries, dim), (queries + dim, dim))[part]
    return tensor.unflatten(0, (groups, -1)).narrow(1, start, size).flatten(0, 1)


_PARTLY_ROTATED = ("glm4", "glm4_moe")
"""Families of which transformers reads ``partial_rotary_factor``."""


_LATER_GEMMAS = ("gemma2", "gemma3_text")


def embedding_scale(config: PretrainedConfig) -> float:
    """What an embedding is multiplied by."""
    return float(config.hidden_size) ** 0.5 if config.model_type in ("gemma", *_LATER_GEMMAS) else 1.0


def norms_behind(config: PretrainedConfig) -> bool:
    """Whether what attention and MLP say is normalised before it is added to the residual."""
    return config.model_type in ("glm4", *_LATER_GEMMAS)


def soft_caps(config: PretrainedConfig) -> tuple[float | None, float | None]:
    """Bounds of attention's scores and of the logits, cap x tanh(score / cap); None where there is none."""
    if config.model_type not in _LATER_GEMMAS:
        return None, None
    return config.attn_logit_softcapping, config.final_logit_softcapping


def local_rope_base(config: PretrainedConfig) -> float | None:
    """Rotary base of layers with a sliding window, where it is another than that of the others.

    Raises:
        ConfigError: their positions are scaled.
    """
    rope = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if rope is None:
        return None
    if rope.get("rope_type", "default") != "default":
        raise _unknown_rope(rope, "rope_type default in layers with a sliding window")
    return float(rope["rope_theta"])


def rope_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary base and scaling as arguments of Megatron-Core's GPTModel.

    Raises:
        ConfigError: a scaling that it does not know, or knows with other constants.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    kind = rope.get("rope_type", "default")
    base = {"rotary_base": rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))}
    if config.model_type in _PARTLY_ROTATED:
        base["rotary_percent"] = rope.get("partial_rotary_factor", 1.0)
    if kind == "default":
        return base
    if kind == "linear":
        return {**base, "seq_len_interpolation_factor": rope["factor"]}
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind != "llama3" or any(rope.get(name) != value for name, value in llama3.items()):
        raise _unknown_rope(rope, f"rope_type default or linear, or llama3 with {llama3}")
    return {**base, "rope_scaling": True, "rope_scaling_factor": rope["factor"]}


def _unknown_rope(kind: Any, allowed: str) -> ConfigError:
    return ConfigError(
        "Megatron-Core does not scale rotary positions as this model does",
        key="rope_parameters",
        got=kind,
        allowed=allowed,
        fix="Use strategy=fsdp2.",
    )


def _refuse(config: PretrainedConfig, field: str, refused: bool) -> None:
    if refused:
        raise ConfigError(
            f"the Megatron-Core form of {config.model_type} has no such model",
            key=field,
            got=getattr(config, field),
            fix="Use strategy=fsdp2, which trains any transformers model.",
        )
