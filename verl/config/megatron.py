"""Settings of another training engine: The Megatron-Core engine."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class MegatronEngineOverrideTransformerConfigConfig(ConfigNode):
    """``x.megatron.override_transformer_config``."""

    recompute_granularity: str | None = setting(
        None, "full or selective activation recompute", planned="Megatron-Core training"
    )
    recompute_modules: list = setting(["core_attn"], "modules recomputed", planned="Megatron-Core training")
    recompute_method: str | None = setting(None, "uniform or block", planned="Megatron-Core training")
    recompute_num_layers: int | None = setting(None, "layers recomputed", planned="Megatron-Core training")
    attention_backend: str = setting("flash", "flash, fused, unfused, local, auto", planned="Megatron-Core training")


@dataclass(frozen=True)
class MegatronEngineRouterReplayConfig(ConfigNode):
    """``x.megatron.router_replay``."""

    mode: str = setting(
        "disabled",
        "moE routing replay: disabled, R2 (trainer recorded), R3 (rollout recorded)",
        planned="Megatron-Core training",
    )
    record_file: str | None = setting(None, "save recorded routes", planned="Megatron-Core training", path=True)
    replay_file: str | None = setting(None, "load recorded routes", planned="Megatron-Core training", path=True)


@dataclass(frozen=True)
class MegatronEngineQatConfig(ConfigNode):
    """``x.megatron.qat``."""

    enable: bool = setting(False, "QAT", planned="Megatron-Core training")
    mode: str = setting("w4a16", "w4a16 or w4a4", planned="Megatron-Core training")
    group_size: int = setting(16, "block", planned="Megatron-Core training")
    ignore_patterns: list = setting(["lm_head", "*mlp.gate"], "skip list", planned="Megatron-Core training")
    activation_observer: str | None = setting(None, "observer", planned="Megatron-Core training")
    quantization_config_path: str | None = setting(None, "JSON", planned="Megatron-Core training", path=True)


@dataclass(frozen=True)
class MegatronEngineConfig(ConfigNode):
    """The Megatron-Core engine."""

    param_offload: bool = setting(False, "params to host when idle", planned="Megatron-Core training")
    optimizer_offload: bool = setting(False, "optimizer to host when idle", planned="Megatron-Core training")
    tensor_model_parallel_size: int = setting(1, "TP", planned="Megatron-Core training")
    expert_model_parallel_size: int = setting(1, "EP", planned="Megatron-Core training")
    expert_tensor_parallel_size: int | None = setting(None, "expert TP (null = TP)", planned="Megatron-Core training")
    pipeline_model_parallel_size: int = setting(1, "PP", planned="Megatron-Core training")
    virtual_pipeline_model_parallel_size: int | None = setting(None, "interleaved PP", planned="Megatron-Core training")
    context_parallel_size: int = setting(1, "CP", planned="Megatron-Core training")
    sequence_parallel: bool = setting(True, "megatron sequence parallel", planned="Megatron-Core training")
    use_distributed_optimizer: bool = setting(True, "sharded optimizer", planned="Megatron-Core training")
    use_dist_checkpointing: bool = setting(False, "native Megatron dist checkpoint", planned="Megatron-Core training")
    dist_checkpointing_path: str | None = setting(None, "where to load it", planned="Megatron-Core training", path=True)
    dynamic_context_parallel: bool = setting(False, "schedule CP per sequence length", planned="Megatron-Core training")
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None, "token budget for dynamic CP", planned="Megatron-Core training"
    )
    dist_checkpointing_prefix: str = setting("", "key prefix in foreign checkpoints", planned="Megatron-Core training")
    dist_ckpt_optim_fully_reshardable: bool = setting(
        False, "optimizer checkpoint reshardable over TP/PP/EP", planned="Megatron-Core training"
    )
    distrib_optim_fully_reshardable_mem_efficient: bool = setting(
        False, "gloo low-memory variant", planned="Megatron-Core training"
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        "chunked entropy",
        follows="actor_rollout_ref.actor.entropy_from_logits_with_chunking",
        planned="Megatron-Core training",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        "chunk length",
        follows="actor_rollout_ref.actor.entropy_from_logits_chunk_size",
        planned="Megatron-Core training",
    )
    seed: int = setting(42, "RNG seed", planned="Megatron-Core training")
    override_ddp_config: dict = setting({}, "DDP overrides", planned="Megatron-Core training")
    override_transformer_config: MegatronEngineOverrideTransformerConfigConfig = section(
        MegatronEngineOverrideTransformerConfigConfig
    )
    override_mcore_model_config: dict = setting({}, "model overrides", planned="Megatron-Core training")
    use_mbridge: bool = setting(True, "load/save HF weights through Megatron-Bridge", planned="Megatron-Core training")
    vanilla_mbridge: bool = setting(False, "use the old mbridge package", planned="Megatron-Core training")
    use_remove_padding: bool = setting(True, "THD packed layout (else BSHD)", planned="Megatron-Core training")
    pad_bshd_to_minibatch_max: bool = setting(
        True, "BSHD: one pad length per mini-batch", planned="Megatron-Core training"
    )
    pad_to_length: bool = setting(False, "pad packed batch", planned="Megatron-Core training")
    pad_to_length_bucket: int = setting(512, "bucket", planned="Megatron-Core training")
    use_megatron_fsdp: bool = setting(False, "megatron-FSDP (ZeRO-3)", planned="Megatron-Core training")
    forward_only: bool = setting(False, "no optimizer", planned="Megatron-Core training")
    dtype: str = setting("bfloat16", "compute dtype", planned="Megatron-Core training")
    router_replay: MegatronEngineRouterReplayConfig = section(MegatronEngineRouterReplayConfig)
    qat: MegatronEngineQatConfig = section(MegatronEngineQatConfig)
