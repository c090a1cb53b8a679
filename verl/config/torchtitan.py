"""Settings of the TorchTitan engine, which is known by name and not built yet."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class TorchtitanEngineWrapPolicyConfig(ConfigNode):
    """Which layers are sharded for themselves."""

    min_num_params: int = setting(
        0, "smallest number of parameters of such a layer; 0: every transformer block", planned="the TorchTitan engine"
    )


@dataclass(frozen=True)
class TorchtitanEngineConfig(ConfigNode):
    """The TorchTitan engine."""

    param_offload: bool = setting(
        False, "keep the weights in host memory while another role works", planned="the TorchTitan engine"
    )
    optimizer_offload: bool = setting(
        False, "keep the optimizer's state in host memory while another role works", planned="the TorchTitan engine"
    )
    wrap_policy: TorchtitanEngineWrapPolicyConfig = section(TorchtitanEngineWrapPolicyConfig)
    reshard_after_forward: str = setting(
        "default",
        "free gathered weights after the forward pass: default, always or never",
        planned="the TorchTitan engine",
    )
    forward_prefetch: bool = setting(
        False, "gather the next layer while this one runs", planned="the TorchTitan engine"
    )
    use_orig_params: bool = setting(
        False, "keep the original parameters beside the flat ones", planned="the TorchTitan engine"
    )
    mixed_precision: bool = setting(
        False, "compute in a lower precision than that of the weights", planned="the TorchTitan engine"
    )
    use_torch_compile: bool = setting(True, "compile the model", planned="the TorchTitan engine")
    entropy_from_logits_with_chunking: bool = setting(
        False, "compute the entropy in chunks of rows", planned="the TorchTitan engine"
    )
    entropy_from_logits_chunk_size: int = setting(2048, "rows per chunk", planned="the TorchTitan engine")
    entropy_checkpointing: bool = setting(
        False, "compute the entropy again in the backward pass", planned="the TorchTitan engine"
    )
    data_parallel_size: int = setting(1, "data-parallel size", planned="the TorchTitan engine")
    data_parallel_replicate_size: int = setting(1, "copies of the weights (HSDP)", planned="the TorchTitan engine")
    data_parallel_shard_size: int = setting(
        1, "processes that share one copy of the weights", planned="the TorchTitan engine"
    )
    tensor_parallel_size: int = setting(1, "tensor-parallel size", planned="the TorchTitan engine")
    expert_parallel_size: int = setting(1, "expert-parallel size", planned="the TorchTitan engine")
    pipeline_parallel_size: int = setting(1, "pipeline-parallel size", planned="the TorchTitan engine")
    context_parallel_size: int = setting(1, "context-parallel size", planned="the TorchTitan engine")
    attn_type: str = setting("flex", "attention kernel: sdpa, flex or varlen", planned="the TorchTitan engine")
    spmd_backend: str = setting("spmd_types", "default, full_dtensor or spmd_types", planned="the TorchTitan engine")
    activation_checkpoint: str = setting(
        "selective",
        "compute activations again in the backward pass: selective, full or none",
        planned="the TorchTitan engine",
    )
    max_seq_len: int | None = setting(
        None, "longest sequence in tokens; null: what the model allows", planned="the TorchTitan engine"
    )
    strategy: str = setting("torchtitan", "name of the engine", planned="the TorchTitan engine")
    seed: int = setting(42, "seed of the engine", planned="the TorchTitan engine")
    full_determinism: bool = setting(
        False, "deterministic kernels only, for debugging", planned="the TorchTitan engine"
    )
    forward_only: bool = setting(
        False, "the model is not trained and has no optimizer", planned="the TorchTitan engine"
    )
    dtype: str = setting("bfloat16", "dtype of matrix products", planned="the TorchTitan engine")
