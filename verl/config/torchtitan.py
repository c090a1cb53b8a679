"""Settings of another training engine: The TorchTitan engine."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class TorchtitanEngineWrapPolicyConfig(ConfigNode):
    """``x.torchtitan.wrap_policy``."""

    min_num_params: int = setting(0, "wrap threshold", planned="the TorchTitan engine")


@dataclass(frozen=True)
class TorchtitanEngineConfig(ConfigNode):
    """The TorchTitan engine."""

    param_offload: bool = setting(False, "host offload", planned="the TorchTitan engine")
    optimizer_offload: bool = setting(False, "host offload", planned="the TorchTitan engine")
    wrap_policy: TorchtitanEngineWrapPolicyConfig = section(TorchtitanEngineWrapPolicyConfig)
    reshard_after_forward: str = setting("default", "default, always, never", planned="the TorchTitan engine")
    forward_prefetch: bool = setting(False, "prefetch", planned="the TorchTitan engine")
    use_orig_params: bool = setting(False, "flag", planned="the TorchTitan engine")
    mixed_precision: bool = setting(False, "on/off", planned="the TorchTitan engine")
    use_torch_compile: bool = setting(
        True,
        "compile",
        planned="the TorchTitan engine",
        no_effect="the plain engine does not compile; the FSDP engines will",
    )
    entropy_from_logits_with_chunking: bool = setting(False, "chunked entropy", planned="the TorchTitan engine")
    entropy_from_logits_chunk_size: int = setting(2048, "chunk", planned="the TorchTitan engine")
    entropy_checkpointing: bool = setting(False, "recompute", planned="the TorchTitan engine")
    data_parallel_size: int = setting(1, "DP", planned="the TorchTitan engine")
    data_parallel_replicate_size: int = setting(1, "HSDP replicas", planned="the TorchTitan engine")
    data_parallel_shard_size: int = setting(1, "shard degree", planned="the TorchTitan engine")
    tensor_parallel_size: int = setting(1, "TP", planned="the TorchTitan engine")
    expert_parallel_size: int = setting(1, "EP", planned="the TorchTitan engine")
    pipeline_parallel_size: int = setting(1, "PP", planned="the TorchTitan engine")
    context_parallel_size: int = setting(1, "CP", planned="the TorchTitan engine")
    attn_type: str = setting("flex", "sdpa, flex, varlen", planned="the TorchTitan engine")
    spmd_backend: str = setting("spmd_types", "default, full_dtensor, spmd_types", planned="the TorchTitan engine")
    activation_checkpoint: str = setting("selective", "selective, full, none", planned="the TorchTitan engine")
    max_seq_len: int | None = setting(None, "roPE cache length", planned="the TorchTitan engine")
    strategy: str = setting("auto", "torchtitan", upstream="fsdp", planned="the TorchTitan engine")
    seed: int = setting(42, "seed", planned="the TorchTitan engine")
    full_determinism: bool = setting(False, "debug", planned="the TorchTitan engine")
    forward_only: bool = setting(False, "no optimizer", planned="the TorchTitan engine")
    dtype: str = setting("bfloat16", "compute dtype", planned="the TorchTitan engine")
