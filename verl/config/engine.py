"""Settings of the training engines that hold a whole model per data-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class WrapPolicyConfig(ConfigNode):
    """``engine.wrap_policy``."""

    min_num_params: int = setting(0, "size threshold for wrapping a layer", planned="the FSDP engines")


@dataclass(frozen=True)
class QATConfig(ConfigNode):
    """``engine.qat``."""

    enable: bool = setting(False, "see actor.qat", planned="quantization-aware training")
    mode: str = setting("w4a16", "see actor.qat", planned="quantization-aware training")
    group_size: int = setting(16, "see actor.qat", planned="quantization-aware training")
    ignore_patterns: list = setting(
        ["lm_head", "embed_tokens", "re:.*mlp.gate$"], "see actor.qat", planned="quantization-aware training"
    )
    activation_observer: str = setting("static_minmax", "see actor.qat", planned="quantization-aware training")
    quantization_config_path: str | None = setting(
        None, "see actor.qat", planned="quantization-aware training", path=True
    )


@dataclass(frozen=True)
class TurboDistributedFsdpPlanConfig(ConfigNode):
    """``engine.turbo_config.distributed.fsdp_plan``."""

    param_dtype: str = setting("bf16", "compute dtype", planned="the fsdp_turbo engine")
    reduce_dtype: str = setting("fp32", "reduction dtype", planned="the fsdp_turbo engine")
    output_dtype: str = setting("bf16", "output dtype", planned="the fsdp_turbo engine")
    fsdp_implementation: str = setting("native", "which FSDP implementation", planned="the fsdp_turbo engine")
    num_to_forward_prefetch: int = setting(1, "forward prefetch depth", planned="the fsdp_turbo engine")
    num_to_backward_prefetch: int = setting(1, "backward prefetch depth", planned="the fsdp_turbo engine")


@dataclass(frozen=True)
class TurboDistributedConfig(ConfigNode):
    """``engine.turbo_config.distributed``."""

    fully_shard_parallel_size: int = setting(16, "fsdp_turbo shard degree", planned="the fsdp_turbo engine")
    tensor_parallel_size: int = setting(1, "fsdp_turbo TP", planned="the fsdp_turbo engine")
    expert_parallel_size: int = setting(1, "fsdp_turbo EP", planned="the fsdp_turbo engine")
    expert_fully_shard_parallel_size: int = setting(1, "fsdp_turbo expert sharding", planned="the fsdp_turbo engine")
    ulysses_parallel_size: int = setting(1, "fsdp_turbo SP", planned="the fsdp_turbo engine")
    fsdp_plan: TurboDistributedFsdpPlanConfig = section(TurboDistributedFsdpPlanConfig)


@dataclass(frozen=True)
class TurboConfig(ConfigNode):
    """``engine.turbo_config``."""

    distributed: TurboDistributedConfig = section(TurboDistributedConfig)


@dataclass(frozen=True)
class FSDPEngineConfig(ConfigNode):
    """The data-parallel training engines: plain, FSDP and FSDP2."""

    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    param_offload: bool = setting(False, "parameters go to host when idle")
    optimizer_offload: bool = setting(False, "optimizer states go to host when idle")
    offload_policy: bool = setting(
        False, "FSDP2 native CPU offload during training (params, grads, optimizer)", planned="the FSDP engines"
    )
    reshard_after_forward: bool = setting(
        True, "free gathered params after forward (False on FSDP1 = ZeRO-2 style)", planned="the FSDP engines"
    )
    fsdp_size: int = setting(-1, "shard-group size; -1 = all ranks (smaller = HSDP)", planned="the FSDP engines")
    forward_prefetch: bool = setting(False, "FSDP1 all-gather prefetch", planned="the FSDP engines")
    model_dtype: str = setting("fp32", "dtype of master weights")
    use_orig_params: bool = setting(False, "FSDP1 flag", planned="the FSDP engines")
    seed: int = setting(42, "seed of the engine", no_effect="trainer.seed seeds every worker")
    full_determinism: bool = setting(False, "deterministic kernels, debugging only")
    ulysses_sequence_parallel_size: int = setting(
        1, "deepSpeed-Ulysses sequence-parallel degree", planned="Ulysses sequence parallelism"
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        "chunked entropy",
        follows="actor_rollout_ref.actor.entropy_from_logits_with_chunking",
        planned="the memory-saving entropy",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        "chunk length",
        follows="actor_rollout_ref.actor.entropy_from_logits_chunk_size",
        planned="the memory-saving entropy",
    )
    use_torch_compile: bool = setting(
        True, "compile helper functions", no_effect="the plain engine does not compile; the FSDP engines will"
    )
    entropy_checkpointing: bool = setting(
        False,
        "recompute entropy",
        follows="actor_rollout_ref.actor.entropy_checkpointing",
        planned="the memory-saving entropy",
    )
    use_no_sync_for_gradient_accumulation: bool = setting(
        False, "skip grad sync until last micro-batch", planned="the FSDP engines"
    )
    pad_to_length: bool = setting(
        False, "pad packed batch to bucket", follows="actor_rollout_ref.actor.pad_to_length", planned="padded packing"
    )
    pad_to_length_bucket: int = setting(1024, "bucket size in tokens", planned="padded packing")
    forward_only: bool = setting(
        False,
        "no optimizer (ref model)",
        no_effect="a reference model never has an optimizer, a trained one always has",
    )
    dtype: str = setting("auto", "mixed-precision compute dtype", upstream="bfloat16")
    qat: QATConfig = section(QATConfig)
    turbo_config: TurboConfig = section(TurboConfig)
