"""Settings of another training engine: The VeOmni engine."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class VeOmniEngineRouterReplayConfig(ConfigNode):
    """``x.veomni.router_replay``."""

    mode: str = setting("disabled", "disabled, R2, R3", planned="the VeOmni engine")


@dataclass(frozen=True)
class VeOmniEngineConfig(ConfigNode):
    """The VeOmni engine."""

    param_offload: bool = setting(False, "host offload", planned="the VeOmni engine")
    optimizer_offload: bool = setting(False, "host offload", planned="the VeOmni engine")
    fsdp_size: int = setting(-1, "shard size", planned="the VeOmni engine")
    ulysses_parallel_size: int = setting(1, "sequence parallel", planned="the VeOmni engine")
    expert_parallel_size: int = setting(1, "EP", planned="the VeOmni engine")
    mixed_precision: bool = setting(True, "on/off", planned="the VeOmni engine")
    seed: int = setting(42, "seed", planned="the VeOmni engine")
    full_determinism: bool = setting(False, "debug", planned="the VeOmni engine")
    init_device: str = setting("meta", "meta init", planned="the VeOmni engine")
    enable_full_shard: bool = setting(True, "full sharding", planned="the VeOmni engine")
    ckpt_manager: str = setting("dcp", "dcp", planned="the VeOmni engine")
    load_checkpoint_path: str | None = setting(None, "initial checkpoint", planned="the VeOmni engine", path=True)
    forward_prefetch: bool = setting(True, "prefetch", planned="the VeOmni engine")
    strategy: str = setting("auto", "veomni", upstream="fsdp", planned="the VeOmni engine")
    use_torch_compile: bool = setting(
        False,
        "compile",
        planned="the VeOmni engine",
        no_effect="the plain engine does not compile; the FSDP engines will",
    )
    entropy_from_logits_with_chunking: bool = setting(False, "chunked entropy", planned="the VeOmni engine")
    entropy_checkpointing: bool = setting(False, "recompute entropy", planned="the VeOmni engine")
    forward_only: bool = setting(False, "no optimizer", planned="the VeOmni engine")
    enable_fsdp_offload: bool = setting(False, "FSDP CPU offload", planned="the VeOmni engine")
    enable_reentrant: bool = setting(False, "reentrant checkpointing", planned="the VeOmni engine")
    attn_implementation: str = setting(
        "flash_attention_2",
        "eager, sdpa, flash_attention_2/3, veomni SP variants, native-sparse",
        planned="the VeOmni engine",
    )
    moe_implementation: str = setting("fused", "eager or fused", planned="the VeOmni engine")
    cross_entropy_loss_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    rms_norm_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    swiglu_mlp_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    rotary_pos_emb_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    rms_norm_gated_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    causal_conv1d_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    chunk_gated_delta_rule_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    load_balancing_loss_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    dsa_indexer_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    dsa_attention_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    mhc_implementation: str = setting("eager", "kernel choice", planned="the VeOmni engine")
    qat_implementation: str = setting("none", "QAT kernel", planned="the VeOmni engine")
    force_use_huggingface: bool = setting(False, "use HF modelling code", planned="the VeOmni engine")
    enable_async_activation_offload: bool = setting(False, "stream activations to host", planned="the VeOmni engine")
    activation_offload_modules: list = setting([], "which modules", planned="the VeOmni engine")
    activation_offload_host_cache_limit_gb: float = setting(4.0, "pinned cache cap", planned="the VeOmni engine")
    basic_modules: list = setting([], "wrap list", planned="the VeOmni engine")
    pad_to_length: bool = setting(
        False, "pad packed batch", follows="actor_rollout_ref.actor.pad_to_length", planned="the VeOmni engine"
    )
    pad_to_length_bucket: int = setting(1024, "bucket", planned="the VeOmni engine")
    router_replay: VeOmniEngineRouterReplayConfig = section(VeOmniEngineRouterReplayConfig)
