"""Settings of the TorchTitan engine (``strategy=torchtitan``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config.schema.node import ConfigNode, section, setting
from verl.config.schema.tree import COUNT

if TYPE_CHECKING:
    from verl.config.schema.model import HFModelConfig

NAME = "torchtitan"
VERSION = "0.3."
NEEDED = ("torchtitan", "spmd_types", "torch_checkpointing", "tyro", "typeguard", "einops", "docstring_parser")
INSTALL = (
    "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1 tyro==1.0.17 "
    "typeguard==4.6.0 docstring_parser==0.18.0 einops==0.8.2"
)
FAMILIES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}
"""Model type of transformers -> package of TorchTitan."""
SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
COPIES, EXPERTS = "data_parallel_replicate_size", "expert_parallel_size"
_LIKE_OTHERS = "rows are packed and attention is computed as in every other engine"


@dataclass(frozen=True)
class TorchTitanWrapPolicyConfig(ConfigNode):
    """What is gathered at a time."""

    min_num_params: int = setting(0, "smallest module to gather at a time", no_effect="TorchTitan gathers layers")


@dataclass(frozen=True)
class TorchTitanEngineConfig(ConfigNode):
    """The TorchTitan engine."""

    param_offload: bool = setting(False, "offload the weights to host memory while another role works")
    optimizer_offload: bool = setting(False, "offload the optimizer's state to host memory while another role works")
    wrap_policy: TorchTitanWrapPolicyConfig = section(TorchTitanWrapPolicyConfig)
    reshard_after_forward: str = setting(
        "default", "free gathered weights after the forward pass", choices=("default", "always", "never")
    )
    forward_prefetch: bool = setting(
        False, "gather the next layer while this one runs", no_effect="TorchTitan prefetches as it sees fit"
    )
    use_orig_params: bool = setting(
        False, "expose the original parameters", no_effect="FSDP2 keeps parameters as they are"
    )
    mixed_precision: bool = setting(False, "compute below float32", no_effect="dtype decides")
    use_torch_compile: bool = setting(False, "compile the layers", upstream=True)
    entropy_from_logits_with_chunking: bool = setting(False, "compute the entropy in chunks of rows, to save memory")
    entropy_from_logits_chunk_size: int = setting(2048, "rows per chunk")
    entropy_checkpointing: bool = setting(False, "recompute the entropy in the backward pass, to save memory")
    data_parallel_size: int = setting(1, "data-parallel size", no_effect="all processes that other sizes leave")
    data_parallel_replicate_size: int = setting(1, "copies of the sharded weights (hybrid sharding)", within=COUNT)
    data_parallel_shard_size: int = setting(
        1, "size of a sharding group", no_effect="all processes that other sizes leave"
    )
    tensor_parallel_size: int = setting(1, "tensor-parallel size; must divide the attention and KV heads", within=COUNT)
    expert_parallel_size: int = setting(1, "ranks that share the experts of a mixture, whole ones each", within=COUNT)
    pipeline_parallel_size: int = setting(1, "stages that the layers are divided into, run by 1F1B", within=COUNT)
    context_parallel_size: int = setting(
        1, "ranks that share the tokens of packed rows; must divide the attention heads", within=COUNT
    )
    attn_type: str = setting("flex", "attention kernel", choices=("sdpa", "flex", "varlen"), no_effect=_LIKE_OTHERS)
    spmd_backend: str = setting(
        "spmd_types",
        "how TorchTitan shards",
        choices=("default", "full_dtensor", "spmd_types"),
        no_effect="partial_dtensor shards, which the tested version of torch needs",
    )
    activation_checkpoint: str = setting(
        "selective",
        "recompute layers in the backward pass",
        choices=("selective", "full", "none"),
        no_effect="model.enable_gradient_checkpointing decides",
    )
    max_seq_len: int | None = setting(
        None, "length of the rotary cache", no_effect="rotary angles are computed for the positions of a pass"
    )
    seed: int = setting(42, "seed of the engine", no_effect="a run has one seed: trainer.seed")
    full_determinism: bool = setting(False, "deterministic kernels only, for debugging; slower")
    forward_only: bool = setting(False, "no optimizer", no_effect="a role without an optimizer has none")
    dtype: str = setting(
        "auto",
        "compute dtype; auto: float32 on CPU, bfloat16 on an accelerator; gradients are summed in float32",
        upstream="bfloat16",
    )

    @property
    def model_dtype(self) -> str:
        """Of the master weights."""
        return "fp32"

    @property
    def pad_to_length(self) -> bool:
        """Packed rows are never padded to a multiple."""
        return False

    @property
    def pad_to_length_bucket(self) -> int:
        """See `pad_to_length`."""
        return 1


TITAN_LIKE_ENGINE = {
    name: f"engine.{name}"
    for name in (
        "param_offload",
        "optimizer_offload",
        "entropy_from_logits_with_chunking",
        "entropy_from_logits_chunk_size",
        "entropy_checkpointing",
        "full_determinism",
        "dtype",
    )
}
"""In supervised training what every engine has is set once, in the section around it."""
TITAN_LIKE_ACTOR = {name: f"actor_rollout_ref.actor.torchtitan.{name}" for name in (COPIES, *SIZES, EXPERTS, "dtype")}
"""Of a role that shares processes with the actor."""


def features_not_built(model: HFModelConfig) -> dict[str, str]:
    """Settings of a model that require what the engine does not have -> what that is."""
    features = {
        "lora_rank": (model.lora_rank > 0, "an adapter"),
        "lora_adapter_path": (bool(model.lora_adapter_path), "an adapter"),
        "use_fused_kernels": (model.use_fused_kernels, "a fused head"),
        "use_liger": (model.use_liger, "Liger's kernels"),
        "tiled_mlp": (model.tiled_mlp.enabled, "a tiled MLP"),
        "enable_activation_offload": (model.enable_activation_offload, "offloading of activations"),
    }
    return {name: what for name, (is_set, what) in features.items() if is_set}
