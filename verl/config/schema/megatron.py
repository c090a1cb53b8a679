"""Settings of the Megatron-Core engine (``strategy=megatron``)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ConfigNode, section, setting


@dataclass(frozen=True)
class MegatronEngineOverrideTransformerConfigConfig(ConfigNode):
    """Fields of Megatron-Core's TransformerConfig; any other belongs in override_mcore_model_config."""

    recompute_granularity: str | None = setting(
        None,
        "activation recomputation: full, selective, or null (none)",
        choices=("full", "selective"),
    )
    recompute_modules: list = setting(["core_attn"], "modules to recompute with selective")
    recompute_method: str | None = setting(
        None, "how full picks layers: uniform or block; null: uniform", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = setting(None, "layers per recomputed group with full; null: 1")
    attention_backend: str = setting(
        "flash",
        "attention kernels of Transformer Engine; without it the local attention runs",
        choices=("flash", "fused", "unfused", "local", "auto"),
    )


@dataclass(frozen=True)
class MegatronEngineConfig(ConfigNode):
    """The Megatron-Core engine."""

    param_offload: bool = setting(False, "offload the weights to host memory while another role works")
    optimizer_offload: bool = setting(False, "offload the optimizer's state to host memory while another role works")
    tensor_model_parallel_size: int = setting(1, "tensor-parallel size; must divide the attention and KV heads")
    expert_model_parallel_size: int = setting(1, "expert-parallel size; must divide the number of experts")
    expert_tensor_parallel_size: int | None = setting(None, "tensor-parallel size of the experts; null: the model's")
    pipeline_model_parallel_size: int = setting(1, "pipeline-parallel size; must divide the number of layers")
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "layer groups per pipeline stage (interleaved schedule); null: one"
    )
    context_parallel_size: int = setting(1, "context-parallel size: peers that share the tokens of packed rows")
    sequence_parallel: bool = setting(True, "shard activations between tensor-parallel layers")
    use_distributed_optimizer: bool = setting(True, "shard the optimizer's state over data-parallel processes")
    seed: int = setting(42, "seed of the engine", no_effect="a run has one seed: trainer.seed")
    override_transformer_config: MegatronEngineOverrideTransformerConfigConfig = section(
        MegatronEngineOverrideTransformerConfigConfig
    )
    override_mcore_model_config: dict = setting({}, "fields of Megatron-Core's TransformerConfig to override")
    override_ddp_config: dict = setting(
        {}, "fields of Megatron-Core's data-parallel wrapper, for scripts that carry them: the engine has none"
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and matrix products; auto: float32 on CPU, bfloat16 (over float32 copies) on an accelerator",
        upstream="bfloat16",
    )


LIKE_ENGINE = {name: f"engine.{name}" for name in ("param_offload", "optimizer_offload", "dtype")}
"""In supervised training what every engine has is set once, in the section around it."""
LIKE_ACTOR = {
    name: f"actor_rollout_ref.actor.megatron.{name}"
    for name in (
        "tensor_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "dtype",
    )
}
"""Of a role that shares processes with the actor: Megatron-Core has one set of groups per process."""
