"""Settings of the VeOmni engine, which is known by name and not built yet."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class VeOmniEngineRouterReplayConfig(ConfigNode):
    """Which experts tokens go to in training."""

    mode: str = setting(
        "disabled",
        "disabled, R2 (as the trainer's log-prob pass had it) or R3 (as the sampler had it)",
        planned="the VeOmni engine",
    )


@dataclass(frozen=True)
class VeOmniEngineConfig(ConfigNode):
    """The VeOmni engine."""

    param_offload: bool = setting(
        False, "keep the weights in host memory while another role works", planned="the VeOmni engine"
    )
    optimizer_offload: bool = setting(
        False, "keep the optimizer's state in host memory while another role works", planned="the VeOmni engine"
    )
    fsdp_size: int = setting(-1, "processes that share one copy of the weights; -1: all", planned="the VeOmni engine")
    ulysses_parallel_size: int = setting(1, "sequence-parallel size (Ulysses)", planned="the VeOmni engine")
    expert_parallel_size: int = setting(1, "expert-parallel size", planned="the VeOmni engine")
    mixed_precision: bool = setting(
        True, "compute in a lower precision than that of the weights", planned="the VeOmni engine"
    )
    seed: int = setting(42, "seed of the engine", planned="the VeOmni engine")
    full_determinism: bool = setting(False, "deterministic kernels only, for debugging", planned="the VeOmni engine")
    init_device: str = setting("meta", "device on which the model is built", planned="the VeOmni engine")
    enable_full_shard: bool = setting(True, "shard weights, gradients and optimizer", planned="the VeOmni engine")
    ckpt_manager: str = setting("dcp", "format of checkpoints", planned="the VeOmni engine")
    load_checkpoint_path: str | None = setting(None, "checkpoint to start from", planned="the VeOmni engine", path=True)
    forward_prefetch: bool = setting(True, "gather the next layer while this one runs", planned="the VeOmni engine")
    strategy: str = setting("veomni", "name of the engine", planned="the VeOmni engine")
    use_torch_compile: bool = setting(False, "compile the log-prob and entropy kernels", planned="the VeOmni engine")
    entropy_from_logits_with_chunking: bool = setting(
        False, "compute the entropy in chunks of rows", planned="the VeOmni engine"
    )
    entropy_checkpointing: bool = setting(
        False, "compute the entropy again in the backward pass", planned="the VeOmni engine"
    )
    forward_only: bool = setting(False, "the model is not trained and has no optimizer", planned="the VeOmni engine")
    enable_fsdp_offload: bool = setting(
        False, "keep weights in host memory during training too", planned="the VeOmni engine"
    )
    enable_reentrant: bool = setting(False, "the older form of gradient checkpointing", planned="the VeOmni engine")
    attn_implementation: str = setting(
        "flash_attention_2",
        "attention kernel: eager, sdpa, flash_attention_2, flash_attention_3, or one of VeOmni's",
        planned="the VeOmni engine",
    )
    moe_implementation: str = setting("fused", "kernel of experts: eager or fused", planned="the VeOmni engine")
    cross_entropy_loss_implementation: str = setting(
        "eager", "kernel of the cross entropy", planned="the VeOmni engine"
    )
    rms_norm_implementation: str = setting("eager", "kernel of RMS norms", planned="the VeOmni engine")
    swiglu_mlp_implementation: str = setting("eager", "kernel of SwiGLU MLPs", planned="the VeOmni engine")
    rotary_pos_emb_implementation: str = setting("eager", "kernel of rotary embeddings", planned="the VeOmni engine")
    rms_norm_gated_implementation: str = setting("eager", "kernel of gated RMS norms", planned="the VeOmni engine")
    causal_conv1d_implementation: str = setting("eager", "kernel of causal convolutions", planned="the VeOmni engine")
    chunk_gated_delta_rule_implementation: str = setting(
        "eager", "kernel of gated delta rules", planned="the VeOmni engine"
    )
    load_balancing_loss_implementation: str = setting(
        "eager", "kernel of the expert-balance loss", planned="the VeOmni engine"
    )
    dsa_indexer_implementation: str = setting(
        "eager", "kernel of sparse attention's indexer", planned="the VeOmni engine"
    )
    dsa_attention_implementation: str = setting("eager", "kernel of sparse attention", planned="the VeOmni engine")
    mhc_implementation: str = setting("eager", "kernel of manifold hyper-connections", planned="the VeOmni engine")
    qat_implementation: str = setting(
        "none", "kernel of quantization-aware training; none: off", planned="the VeOmni engine"
    )
    force_use_huggingface: bool = setting(False, "take Hugging Face's model code", planned="the VeOmni engine")
    enable_async_activation_offload: bool = setting(
        False, "move activations to host memory while computing", planned="the VeOmni engine"
    )
    activation_offload_modules: list = setting([], "modules whose activations are moved", planned="the VeOmni engine")
    activation_offload_host_cache_limit_gb: float = setting(
        4.0, "host memory for them in GB", planned="the VeOmni engine"
    )
    basic_modules: list = setting([], "modules that are sharded for themselves", planned="the VeOmni engine")
    pad_to_length: bool = setting(
        False,
        "round packed micro-batches up to a multiple of pad_to_length_bucket",
        follows="actor_rollout_ref.actor.pad_to_length",
        planned="the VeOmni engine",
    )
    pad_to_length_bucket: int = setting(1024, "that multiple, in tokens", planned="the VeOmni engine")
    router_replay: VeOmniEngineRouterReplayConfig = section(VeOmniEngineRouterReplayConfig)
