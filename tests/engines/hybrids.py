"""Tiny models whose layers carry a state from token to token, of every such family that builds on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.models import tiny_model_dir

MIXED = ["linear_attention", "full_attention"]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": MIXED,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
PACKED: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "bamba": {**SSM, "mamba_expand": 2, "attn_layer_indices": [1]},
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "falcon_h1": {**SSM, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **SSM, "mamba_expand": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "num_dense_layers": 1,
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
        "layers": 4, "hybrid_override_pattern": "M*M-",
    },
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "zamba2": {
        "mamba_d_state": 8, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1,
        "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1,
    },
    "kimi_linear": {
        "linear_head_dim": 8, "linear_num_heads": 4, "layer_types": MIXED, "mlp_layer_types": ["dense", "sparse"],
        "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16,
        "qk_head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Family -> fields of its configuration; its rows are packed."""
PADDED: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4, "expand": 2},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "expand": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "minimax": {"layer_types": MIXED, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    "zaya": {},
    "xlstm": {"num_heads": 4, "chunk_size": 8, "qk_dim_factor": 0.5},
}
"""The same of families whose rows stay padded."""


def hybrid_dir(folder: Path, family: str) -> Path:
    return tiny_model_dir(folder / family, family, **{**PACKED, **PADDED}[family])
