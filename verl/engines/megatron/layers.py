"""Megatron-Core's model for a Hugging Face configuration: this rank's stages, its own layers or Transformer Engine's.

Without Transformer Engine its local layers run, with a norm of ours: theirs knows no sequence parallelism.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verl.config.rules import megatron_fields
from verl.config.schema.role import MegatronEngineConfig, MegatronEngineOverrideTransformerConfigConfig
from verl.engines.megatron.parallel import (
    SECTION,
    MegatronSizes,
    ParallelGroups,
    has_transformer_engine,
    import_megatron,
)
from verl.errors import ConfigError
from verl.metrics import notice
from verl.models.megatron import embedding_scale, local_rope_base, norms_behind, rope_settings, soft_caps

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LATENT_EPS = 1e-6


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 as the Hugging Face families do."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.from_one = bool(config.layernorm_zero_centered_gamma)
        device = import_megatron("utils").torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.eps = eps
        # Each rank normalises its part of the tokens, so the gradients of the parts are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        scaled = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps)
        if self.from_one:  # Gemma, which multiplies in float32
            return (scaled * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * scaled.to(x.dtype)


class LatentNorm(RMSNorm):
    """The norm of latent vectors, whose epsilon transformers takes from no configuration."""

    def __init__(self, config: Any, hidden_size: int, **_: Any):
        super().__init__(config, hidden_size, eps=LATENT_EPS)


class ValueHead(nn.Module):
    """hidden -> 1 in place of the LM head: whole on every tensor-parallel rank."""

    sequence_parallel = False

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight, self.bias), None


def build_chunks(
    hf_config: PretrainedConfig,
    settings: Mapping[str, Any],
    sizes: MegatronSizes,
    groups: ParallelGroups,
    section: MegatronEngineConfig,
    dtype: torch.dtype,
    kind: str,
) -> list[nn.Module]:
    """The stages of this rank, their weights not filled.

    Args:
        settings: fields of TransformerConfig that the family gives.
        section: the ``megatron`` section; its override_transformer_config and override_mcore_model_config count last.

    Raises:
        ConfigError: a field that may not be replaced, or a model that Transformer Engine's attention cannot follow.
    """
    if norms_behind(hf_config) and has_transformer_engine():
        raise ConfigError(
            "Transformer Engine's layers do not normalise, bound or rotate as this model does",
            key=f"{SECTION}.override_transformer_config.attention_backend",
            fix="Use strategy=fsdp2.",
        )
    config = transformer_config(settings, sizes, section, dtype)
    state, model = import_megatron("parallel_state"), import_megatron("models.gpt")
    rope = {} if config.multi_latent_attention else rope_settings(hf_config)
    tied = bool(hf_config.tie_word_embeddings) and kind == "causal_lm"
    chunks = []
    for number in range(sizes.virtual or 1):
        stage = number if sizes.virtual else None
        first = groups.first and number == 0
        last = groups.last and number == (sizes.virtual or 1) - 1
        if sizes.virtual:
            state.set_virtual_pipeline_model_parallel_rank(number)
        chunk = model.GPTModel(
            config,
            _layer_specs(config, stage),
            vocab_size=padded_vocabulary(hf_config.vocab_size, sizes.tensor),
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            vp_stage=stage,
            **rope,
        )
        if last:
            if kind == "value":
                device = import_megatron("utils").torch.cuda.current_device()
                chunk.output_layer = ValueHead(config.hidden_size, dtype, device)
            # Hidden states are gathered where the positions are chosen that the head sees (see `forward`).
            chunk.output_layer.sequence_parallel = False
        if first and (scale := embedding_scale(hf_config)) != 1.0:
            chunk.embedding.register_forward_hook(lambda _, __, out: out * out.new_tensor(scale))
        _beyond(chunk, hf_config, config)
        if not has_transformer_engine():
            _place_by_row(chunk)
            _rotate_locally(chunk, hf_config, config)
        chunks.append(chunk)
    return chunks


def _beyond(chunk: Any, hf_config: PretrainedConfig, config: Any) -> None:
    """What some families have beyond Megatron-Core's layers: norms behind attention and MLP, and bounded scores."""
    cap, behind = soft_caps(hf_config)[0], norms_behind(hf_config)
    for layer in chunk.decoder.layers if behind or cap is not None else ():
        layer.self_attention.core_attention.softcap = cap
        for part in (layer.self_attention, layer.mlp) if behind else ():
            part.add_module("norm_behind", RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon))
            part.register_forward_hook(lambda module, _, out: (module.norm_behind(out[0]), out[1]))


def _place_by_row(chunk: Any) -> None:
    """Let rotary positions be those of the tokens of a packed row."""
    rows = importlib.import_module("verl.engines.megatron.packed")
    owners = [chunk, *(layer.self_attention for layer in chunk.decoder.layers)]
    for owner in owners:
        if hasattr(owner, "rotary_pos_emb"):
            owner.rotary_pos_emb = rows.RowPositions(owner.rotary_pos_emb)


def _rotate_locally(chunk: Any, hf_config: PretrainedConfig, config: Any) -> None:
    """Give layers with a sliding window a rotary base of their own, where the family has one."""
    base = local_rope_base(hf_config)
    if base is None:
        return
    rows = importlib.import_module("verl.engines.megatron.packed")
    rotary = import_megatron("models.common.embeddings.rotary_pos_embedding").RotaryEmbedding
    local = rows.RowPositions(rotary(config.kv_channels, rotary_percent=1.0, rotary_base=base))

    def replace(
        _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        row = options.get("packed_seq_params")
        length = options["rotary_pos_emb"].shape[0] if row is None else row
        return inputs, {**options, "rotary_pos_emb": local(length)}

    for layer in chunk.decoder.layers:
        if hf_config.layer_types[layer.layer_number - 1] == "sliding_attention":
            layer.self_attention.register_forward_pre_hook(replace, with_kwargs=True)


def transformer_config(
    settings: Mapping[str, Any], sizes: MegatronSizes, section: MegatronEngineConfig, dtype: torch.dtype
) -> Any:
    """Megatron-Core's TransformerConfig.

    Raises:
        ConfigError: an override that does not exist, is decided otherwise, or describes another model.
    """
    module = import_megatron("transformer.transformer_config")
    cls = module.MLATransformerConfig if settings.get("multi_latent_attention") else module.TransformerConfig
    fields = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        # The local layers see each rank's part of the tokens as they see a full row.
        "context_parallel_size": sizes.context if has_transformer_engine() else 1,
        "virtual_pipeline_model_parallel_size": sizes.virtual,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": sizes.sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,
        # Two stages send each other activations and gradients; batched point-to-point calls would mix them up.
        "overlap_p2p_comm": sizes.virtual is not None,
        "batch_p2p_comm": sizes.virtual is None,
        "calculate_per_token_loss": True,  # the loss carries its own denominator: no schedule divides it again
        "perform_initialization": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        **_recomputed(section.override_transformer_config),
        **_attention(section.override_transformer_config.attention_backend),
        **settings,
    }
    key = f"{SECTION}.override_mcore_model_config"
    for problem in megatron_fields.problems(SECTION, section):
        raise problem
    fast = has_transformer_engine()
    if not fast:
        megatron_fields.refuse_low_precision(key, section)
    usual = {name: field.default for name, field in cls.__dataclass_fields__.items()}
    fields |= megatron_fields.handed_on(key, section, fields, usual, fast)
    if fields.get("num_moe_experts") is not None and sizes.tensor > 1 and not sizes.sequence:
        fields["sequence_parallel"] = True
        notice(
            f"{SECTION}.sequence_parallel",
            "is switched on: Megatron-Core needs it for experts beside tensor parallelism",
        )
    return cls(**fields)


def _attention(backend: str) -> dict[str, Any]:
    """Fields for Transformer Engine's kernels; the local attention has one kind."""
    if has_transformer_engine():
        return {"attention_backend": import_megatron("transformer.enums").AttnBackend[backend]}
    if backend not in ("flash", "local"):
        notice(
            f"{SECTION}.override_transformer_config.attention_backend",
            f"{backend} has no effect without Transformer Engine: the local attention runs",
        )
    return {}


def _recomputed(section: MegatronEngineOverrideTransformerConfigConfig) -> dict[str, Any]:
    """Which activations are computed again in the backward pass; ``full`` alone means every layer."""
    if section.recompute_granularity is None:
        return {}
    if section.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(section.recompute_modules)}
    return {
        "recompute_granularity": section.recompute_granularity,
        "recompute_method": section.recompute_method or "uniform",
        "recompute_num_layers": section.recompute_num_layers or 1,
    }


def padded_vocabulary(size: int, ranks: int) -> int:
    """Rows of the embedding, so that each rank has the same number."""
    return -(-size // ranks) * ranks


def _layer_specs(config: Any, stage: int | None) -> Any:
    specs = import_megatron("models.gpt.gpt_layer_specs")
    fast = has_transformer_engine()
    block = specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=fast, normalization=config.normalization, vp_stage=stage
    )
    if fast:
        if config.multi_latent_attention and config.layernorm_epsilon != LATENT_EPS:
            raise ConfigError(
                "Transformer Engine's latent attention has one epsilon for all norms; this model's latent norms differ",
                key="rms_norm_eps",
                got=config.layernorm_epsilon,
                allowed=[LATENT_EPS],
                fix="Use strategy=fsdp2.",
            )
        return block
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        if config.multi_latent_attention:
            latent = importlib.import_module("verl.engines.megatron.latent")
            attention.module = latent.LatentAttention
            attention.submodules.core_attention = latent.CoreAttention
            attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
            continue
        attention.submodules.core_attention = importlib.import_module("verl.engines.megatron.packed").PackedAttention
        if config.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return block
