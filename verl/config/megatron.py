"""Settings of the Megatron-Core engine (``strategy=megatron``)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting

_CONTEXT = "context parallelism, which needs Transformer Engine"
_FORMAT = "Megatron's own checkpoint format"
_ANY_SIZE = "every checkpoint loads at any parallel sizes"
_TABLES = "weights are read and written by the tables of verl/models/megatron.py"
_ACTOR = "actor_rollout_ref.actor.megatron"


@dataclass(frozen=True)
class MegatronEngineOverrideTransformerConfigConfig(ConfigNode):
    """Entries of Megatron-Core's TransformerConfig to replace; others go into override_mcore_model_config."""

    recompute_granularity: str | None = setting(
        None,
        "compute activations again in the backward pass: full, selective, or null for none",
        choices=("full", "selective"),
    )
    recompute_modules: list = setting(["core_attn"], "modules computed again with selective")
    recompute_method: str | None = setting(
        None, "how layers are chosen with full: uniform or block; null: uniform", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = setting(None, "layers computed again with full, as one; null: 1")
    attention_backend: str = setting(
        "flash",
        "kernels of Transformer Engine's attention; without it the local attention runs",
        choices=("flash", "fused", "unfused", "local", "auto"),
    )


@dataclass(frozen=True)
class MegatronEngineRouterReplayConfig(ConfigNode):
    """Which experts tokens go to in training."""

    mode: str = setting(
        "disabled",
        "disabled, R2 (as the trainer's log-prob pass had it) or R3 (as the sampler had it)",
        planned="router replay",
    )
    record_file: str | None = setting(None, "file to write routes to", planned="router replay", path=True)
    replay_file: str | None = setting(None, "file to read routes from", planned="router replay", path=True)


@dataclass(frozen=True)
class MegatronEngineQatConfig(ConfigNode):
    """Training with the rounding of low-precision weights in the forward pass."""

    enable: bool = setting(False, "train with quantized weights", planned="quantization-aware training")
    mode: str = setting("w4a16", "w4a16 or w4a4", planned="quantization-aware training")
    group_size: int = setting(16, "numbers that share one scale", planned="quantization-aware training")
    ignore_patterns: list = setting(
        ["lm_head", "*mlp.gate"], "modules that stay unquantized", planned="quantization-aware training"
    )
    activation_observer: str | None = setting(
        None, "how the range of activations is found (w4a4)", planned="quantization-aware training"
    )
    quantization_config_path: str | None = setting(
        None, "JSON file with the quantization of the sampler", planned="quantization-aware training", path=True
    )


@dataclass(frozen=True)
class MegatronEngineConfig(ConfigNode):
    """The Megatron-Core engine."""

    param_offload: bool = setting(False, "keep the weights in host memory while another role works")
    optimizer_offload: bool = setting(False, "keep the optimizer's state in host memory while another role works")
    tensor_model_parallel_size: int = setting(1, "tensor-parallel size; divides the attention and key-value heads")
    expert_model_parallel_size: int = setting(1, "expert-parallel size; divides the number of experts")
    expert_tensor_parallel_size: int | None = setting(None, "tensor-parallel size of experts; null: that of the model")
    pipeline_model_parallel_size: int = setting(1, "pipeline-parallel size; divides the number of layers")
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "layer groups per pipeline stage (interleaved schedule); null: one"
    )
    context_parallel_size: int = setting(1, "context-parallel size", planned=_CONTEXT)
    sequence_parallel: bool = setting(True, "shard activations between tensor-parallel layers")
    use_distributed_optimizer: bool = setting(True, "shard the optimizer's state over data-parallel processes")
    use_dist_checkpointing: bool = setting(False, "read and write Megatron's own checkpoint format", planned=_FORMAT)
    dist_checkpointing_path: str | None = setting(None, "folder of such a checkpoint", planned=_FORMAT, path=True)
    dynamic_context_parallel: bool = setting(
        False, "choose the context-parallel size by the sequence length", planned=_CONTEXT
    )
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None, "tokens per process with dynamic_context_parallel", planned=_CONTEXT
    )
    dist_checkpointing_prefix: str = setting("", "prefix of the names in a foreign checkpoint", planned=_FORMAT)
    dist_ckpt_optim_fully_reshardable: bool = setting(
        False, "write optimizer states that load at any parallel size", no_effect=_ANY_SIZE
    )
    distrib_optim_fully_reshardable_mem_efficient: bool = setting(
        False, "the same with less GPU memory, over gloo", no_effect=_ANY_SIZE
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        "compute the entropy in chunks of rows",
        follows="actor_rollout_ref.actor.entropy_from_logits_with_chunking",
        no_effect="each process computes the entropy from its own part of the logits",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        "rows per chunk",
        follows="actor_rollout_ref.actor.entropy_from_logits_chunk_size",
        no_effect="each process computes the entropy from its own part of the logits",
    )
    seed: int = setting(42, "seed of the engine", no_effect="a run has one seed: trainer.seed")
    override_ddp_config: dict = setting(
        {}, "entries of Megatron's DDP configuration to replace", planned="Megatron's data-parallel wrapper"
    )
    override_transformer_config: MegatronEngineOverrideTransformerConfigConfig = section(
        MegatronEngineOverrideTransformerConfigConfig
    )
    override_mcore_model_config: dict = setting(
        {}, "fields of Megatron-Core's TransformerConfig to replace, by their names there"
    )
    use_mbridge: bool = setting(True, "read and write Hugging Face weights through Megatron-Bridge", no_effect=_TABLES)
    vanilla_mbridge: bool = setting(False, "take the older package mbridge", no_effect=_TABLES)
    use_remove_padding: bool = setting(
        True, "pack rows without padding", no_effect="rows are padded: packed attention needs Transformer Engine"
    )
    pad_bshd_to_minibatch_max: bool = setting(
        True,
        "without packing: pad all micro-batches of a mini-batch to one length",
        no_effect="a micro-batch is as long as its longest row; pipeline stages tell each other its shape",
    )
    pad_to_length: bool = setting(
        False, "round packed micro-batches up to a multiple of pad_to_length_bucket", planned="padded packing"
    )
    pad_to_length_bucket: int = setting(512, "that multiple, in tokens", planned="padded packing")
    use_megatron_fsdp: bool = setting(False, "shard weights by Megatron-FSDP (ZeRO-3)", planned="Megatron-FSDP")
    forward_only: bool = setting(
        False,
        "the model is not trained and has no optimizer",
        no_effect="a reference model never has an optimizer, a trained one always has",
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and matrix products; auto: float32 on CPU, bfloat16 (over float32 copies) on an accelerator",
        upstream="bfloat16",
    )
    router_replay: MegatronEngineRouterReplayConfig = section(MegatronEngineRouterReplayConfig)
    qat: MegatronEngineQatConfig = section(MegatronEngineQatConfig)


@dataclass(frozen=True)
class MegatronEngineSupervisedConfig(MegatronEngineConfig):
    """The engine of supervised training; what every engine has is set once, in the section around it."""

    param_offload: bool = setting(
        False, "keep the weights in host memory while another role works", follows="engine.param_offload"
    )
    optimizer_offload: bool = setting(
        False, "keep the optimizer's state in host memory while another role works", follows="engine.optimizer_offload"
    )
    dtype: str = setting("auto", "dtype of weights and matrix products", upstream="bfloat16", follows="engine.dtype")


@dataclass(frozen=True)
class MegatronEngineBesideActorConfig(MegatronEngineConfig):
    """The engine of a role that shares processes with the actor: Megatron-Core has one set of groups per process."""

    tensor_model_parallel_size: int = setting(
        1, "tensor-parallel size; the actor's unless it is set", follows=f"{_ACTOR}.tensor_model_parallel_size"
    )
    expert_model_parallel_size: int = setting(
        1, "expert-parallel size; the actor's unless it is set", follows=f"{_ACTOR}.expert_model_parallel_size"
    )
    expert_tensor_parallel_size: int | None = setting(
        None,
        "tensor-parallel size of experts; null: that of the model",
        follows=f"{_ACTOR}.expert_tensor_parallel_size",
    )
    pipeline_model_parallel_size: int = setting(
        1, "pipeline-parallel size; the actor's unless it is set", follows=f"{_ACTOR}.pipeline_model_parallel_size"
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        "layer groups per pipeline stage; the actor's unless it is set",
        follows=f"{_ACTOR}.virtual_pipeline_model_parallel_size",
    )
    sequence_parallel: bool = setting(
        True, "shard activations between tensor-parallel layers", follows=f"{_ACTOR}.sequence_parallel"
    )
    dtype: str = setting("auto", "dtype of weights and matrix products", upstream="bfloat16", follows=f"{_ACTOR}.dtype")
