"""Settings of the training engines that hold a full model per data-parallel group."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import AMOUNT, COUNT, DTYPE, MODEL_DTYPE
from verl.config.schema.node import ABSENT, ConfigNode, section, setting


@dataclass(frozen=True)
class WrapPolicyConfig(ConfigNode):
    """Which modules FSDP shards as units."""

    min_num_params: int = setting(
        0,
        "minimum parameters of a module that is sharded on its own; 0: every transformer block",
        within=AMOUNT,
    )


@dataclass(frozen=True)
class FSDPEngineConfig(ConfigNode):
    """Training engines plain (one device) and FSDP2."""

    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    param_offload: bool = setting(
        False,
        "offload the weights to host memory while another role works; no effect on a CPU",
    )
    optimizer_offload: bool = setting(
        False, "offload the optimizer's state to host memory while another role works; no effect on a CPU"
    )
    offload_policy: bool = setting(
        False,
        "keep weights, gradients and optimizer in host memory during training too",
    )
    reshard_after_forward: bool = setting(
        True,
        "free gathered weights after the forward pass (ZeRO-3); false keeps them for the backward pass (ZeRO-2)",
    )
    fsdp_size: int = setting(
        -1, "size of a sharding group, which holds one copy of the weights; -1: all processes; fewer: HSDP"
    )
    forward_prefetch: bool = setting(False, "gather the next layer while this one runs")
    model_dtype: str = setting("fp32", "dtype of the master weights", within=MODEL_DTYPE)
    use_orig_params: bool = setting(
        False, "expose the original parameters to the optimizer", no_effect="FSDP2 keeps parameters as they are"
    )
    seed: int = setting(42, "seed of new weights (a value head)", no_effect="a run has one seed: trainer.seed")
    full_determinism: bool = setting(False, "deterministic kernels only, for debugging; slower")
    ulysses_sequence_parallel_size: int = setting(
        1,
        "sequence-parallel size (DeepSpeed-Ulysses); must divide the attention heads",
        follows="..ulysses_sequence_parallel_size",
        within=COUNT,
    )
    expert_parallel_size: int = setting(
        1,
        "expert-parallel size; must divide the number of experts",
        upstream=ABSENT,
        within=COUNT,
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        "compute the entropy in chunks of rows, to save memory",
        follows="actor_rollout_ref.actor.entropy_from_logits_with_chunking",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        "rows per chunk",
        follows="actor_rollout_ref.actor.entropy_from_logits_chunk_size",
    )
    use_torch_compile: bool | None = setting(
        None,
        "compile the transformer layers (the first step takes a minute longer); null: only on a GPU, "
        "in one process, from half a billion parameters",
        follows="..use_torch_compile",
        upstream=True,
    )
    entropy_checkpointing: bool = setting(
        False,
        "recompute the entropy in the backward pass, to save memory",
        follows="actor_rollout_ref.actor.entropy_checkpointing",
    )
    use_no_sync_for_gradient_accumulation: bool = setting(
        False, "sum gradients over processes only at the last micro-batch"
    )
    pad_to_length: bool = setting(
        False,
        "pad packed micro-batches to a multiple of pad_to_length_bucket, for fewer distinct lengths",
        follows="..pad_to_length",
    )
    pad_to_length_bucket: int = setting(1024, "pad_to_length: the multiple, in tokens")
    dtype: str = setting(
        "auto",
        "dtype of matrix products; auto: float32 on CPU, bfloat16 on an accelerator",
        upstream="bfloat16",
        within=DTYPE,
    )
