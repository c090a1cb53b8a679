"""Small configurations of every family that Megatron-Core training knows: a name, the family, its configuration."""

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LATENT = {
    "kv_heads": 4, "head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MOONLIGHT = {
    **{name: value for name, value in LATENT.items() if not name.endswith("group")},
    "q_lora_rank": None, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
}  # fmt: skip
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GLM = {
    **{name: LATENT[name] for name in (
        "first_k_dense_replace", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group",
        "n_shared_experts", "moe_intermediate_size",
    )},
    "use_qk_norm": True, "attention_bias": True,
}  # fmt: skip
GLM4 = {"head_dim": 16, "attention_bias": True}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA2 = {
    "tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0,
}  # fmt: skip
GEMMA3 = {
    "tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 24, "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    },
}  # fmt: skip
FAMILIES = (
    ("llama", "llama", {}),
    ("mistral", "mistral", {"kv_heads": 4}),
    ("qwen2", "qwen2", {}),
    ("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    ("qwen3", "qwen3", {"head_dim": 16}),
    ("qwen3_moe", "qwen3_moe", {**MIXTURE, "mlp_only_layers": [0]}),
    ("deepseek_v3", "deepseek_v3", LATENT),
    ("mixtral", "mixtral", MIXTRAL),
    ("gemma", "gemma", {"tie_word_embeddings": True}),
    ("gemma2", "gemma2", GEMMA2),
    ("gemma3_text", "gemma3_text", GEMMA3),
    ("glm4", "glm4", GLM4),
    ("glm4-without-biases", "glm4", {**GLM4, "attention_bias": False}),
    ("glm4_moe", "glm4_moe", GLM),
    ("glm4_moe-plain", "glm4_moe", {**GLM, "use_qk_norm": False, "attention_bias": False}),
    ("moonlight", "deepseek_v3", MOONLIGHT),
    ("deepseek_v3-whole-queries", "deepseek_v3", {**LATENT, "q_lora_rank": None}),
)
