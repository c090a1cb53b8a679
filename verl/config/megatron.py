"""Settings of the Megatron-Core engine, which is known by name and not built yet."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class MegatronEngineOverrideTransformerConfigConfig(ConfigNode):
    """Entries of Megatron-Core's TransformerConfig to replace."""

    recompute_granularity: str | None = setting(
        None,
        "compute activations again in the backward pass: full, selective, or null for none",
        planned="Megatron-Core training",
    )
    recompute_modules: list = setting(
        ["core_attn"], "modules computed again with selective", planned="Megatron-Core training"
    )
    recompute_method: str | None = setting(
        None, "how layers are chosen with full: uniform or block", planned="Megatron-Core training"
    )
    recompute_num_layers: int | None = setting(
        None, "layers computed again with full", planned="Megatron-Core training"
    )
    attention_backend: str = setting("flash", "flash, fused, unfused, local or auto", planned="Megatron-Core training")


@dataclass(frozen=True)
class MegatronEngineRouterReplayConfig(ConfigNode):
    """Which experts tokens go to in training."""

    mode: str = setting(
        "disabled",
        "disabled, R2 (as the trainer's log-prob pass had it) or R3 (as the sampler had it)",
        planned="Megatron-Core training",
    )
    record_file: str | None = setting(None, "file to write routes to", planned="Megatron-Core training", path=True)
    replay_file: str | None = setting(None, "file to read routes from", planned="Megatron-Core training", path=True)


@dataclass(frozen=True)
class MegatronEngineQatConfig(ConfigNode):
    """Training with the rounding of low-precision weights in the forward pass."""

    enable: bool = setting(False, "train with quantized weights", planned="Megatron-Core training")
    mode: str = setting("w4a16", "w4a16 or w4a4", planned="Megatron-Core training")
    group_size: int = setting(16, "numbers that share one scale", planned="Megatron-Core training")
    ignore_patterns: list = setting(
        ["lm_head", "*mlp.gate"], "modules that stay unquantized", planned="Megatron-Core training"
    )
    activation_observer: str | None = setting(
        None, "how the range of activations is found (w4a4)", planned="Megatron-Core training"
    )
    quantization_config_path: str | None = setting(
        None, "JSON file with the quantization of the sampler", planned="Megatron-Core training", path=True
    )


@dataclass(frozen=True)
class MegatronEngineConfig(ConfigNode):
    """The Megatron-Core engine."""

    param_offload: bool = setting(
        False, "keep the weights in host memory while another role works", planned="Megatron-Core training"
    )
    optimizer_offload: bool = setting(
        False, "keep the optimizer's state in host memory while another role works", planned="Megatron-Core training"
    )
    tensor_model_parallel_size: int = setting(1, "tensor-parallel size", planned="Megatron-Core training")
    expert_model_parallel_size: int = setting(1, "expert-parallel size", planned="Megatron-Core training")
    expert_tensor_parallel_size: int | None = setting(
        None, "tensor-parallel size of experts; null: that of the model", planned="Megatron-Core training"
    )
    pipeline_model_parallel_size: int = setting(1, "pipeline-parallel size", planned="Megatron-Core training")
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "layer groups per pipeline stage (interleaved schedule); null: one", planned="Megatron-Core training"
    )
    context_parallel_size: int = setting(1, "context-parallel size", planned="Megatron-Core training")
    sequence_parallel: bool = setting(
        True, "shard activations between tensor-parallel layers", planned="Megatron-Core training"
    )
    use_distributed_optimizer: bool = setting(True, "shard the optimizer's state", planned="Megatron-Core training")
    use_dist_checkpointing: bool = setting(
        False, "read and write Megatron's own checkpoint format", planned="Megatron-Core training"
    )
    dist_checkpointing_path: str | None = setting(
        None, "folder of such a checkpoint", planned="Megatron-Core training", path=True
    )
    dynamic_context_parallel: bool = setting(
        False, "choose the context-parallel size by the sequence length", planned="Megatron-Core training"
    )
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None, "tokens per process with dynamic_context_parallel", planned="Megatron-Core training"
    )
    dist_checkpointing_prefix: str = setting(
        "", "prefix of the names in a foreign checkpoint", planned="Megatron-Core training"
    )
    dist_ckpt_optim_fully_reshardable: bool = setting(
        False, "write optimizer states that load at any parallel size", planned="Megatron-Core training"
    )
    distrib_optim_fully_reshardable_mem_efficient: bool = setting(
        False, "the same with less GPU memory, over gloo", planned="Megatron-Core training"
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        "compute the entropy in chunks of rows",
        follows="actor_rollout_ref.actor.entropy_from_logits_with_chunking",
        planned="Megatron-Core training",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        "rows per chunk",
        follows="actor_rollout_ref.actor.entropy_from_logits_chunk_size",
        planned="Megatron-Core training",
    )
    seed: int = setting(42, "seed of the engine", planned="Megatron-Core training")
    override_ddp_config: dict = setting(
        {}, "entries of Megatron's DDP configuration to replace", planned="Megatron-Core training"
    )
    override_transformer_config: MegatronEngineOverrideTransformerConfigConfig = section(
        MegatronEngineOverrideTransformerConfigConfig
    )
    override_mcore_model_config: dict = setting(
        {}, "entries of the model's configuration to replace", planned="Megatron-Core training"
    )
    use_mbridge: bool = setting(
        True, "read and write Hugging Face weights through Megatron-Bridge", planned="Megatron-Core training"
    )
    vanilla_mbridge: bool = setting(False, "take the older package mbridge", planned="Megatron-Core training")
    use_remove_padding: bool = setting(True, "pack rows without padding", planned="Megatron-Core training")
    pad_bshd_to_minibatch_max: bool = setting(
        True, "without packing: pad all micro-batches of a mini-batch to one length", planned="Megatron-Core training"
    )
    pad_to_length: bool = setting(
        False, "round packed micro-batches up to a multiple of pad_to_length_bucket", planned="Megatron-Core training"
    )
    pad_to_length_bucket: int = setting(512, "that multiple, in tokens", planned="Megatron-Core training")
    use_megatron_fsdp: bool = setting(
        False, "shard weights by Megatron-FSDP (ZeRO-3)", planned="Megatron-Core training"
    )
    forward_only: bool = setting(
        False, "the model is not trained and has no optimizer", planned="Megatron-Core training"
    )
    dtype: str = setting("bfloat16", "dtype of matrix products", planned="Megatron-Core training")
    router_replay: MegatronEngineRouterReplayConfig = section(MegatronEngineRouterReplayConfig)
    qat: MegatronEngineQatConfig = section(MegatronEngineQatConfig)
