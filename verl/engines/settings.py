"""What an engine makes of the dtype settings, and what it sets for the entire process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import key_of
from verl.config.schema.role import FSDPEngineConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.device import torch_dtype
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice


@dataclass(frozen=True)
class PassSettings:
    """How a forward pass is laid out; nothing but ``router_replay`` changes a result.

    Args:
        packed: rows without padding (``model.use_remove_padding``).
        share_prompts: the prompt of several rows is computed once (``actor.use_prefix_grouper``); needs ``packed``.
        fused_head: backend of the fused LM head (``model.use_fused_kernels``), None for the model's own head.
        entropy_chunk: rows of logits per piece of the entropy (``entropy_from_logits_with_chunking``), None all.
        entropy_again: the entropy is computed again in the backward pass (``entropy_checkpointing``).
        multiple: packed rows get padding until their tokens are a multiple of it (``pad_to_length``).
        packed_key: the setting behind ``packed``, for messages.
        top_k: tokens per position of the outputs ``top_k_ids`` and ``top_k_log_probs``, most likely first.
        router_replay: experts that a batch has recorded are chosen again, and the output ``routed_experts`` records
            them (``actor.router_replay.mode``).
    """

    packed: bool = True
    share_prompts: bool = False
    fused_head: str | None = None
    entropy_chunk: int | None = None
    entropy_again: bool = False
    multiple: int = 1
    packed_key: str = "use_remove_padding"
    top_k: int = 0
    router_replay: bool = False

    @classmethod
    def of(
        cls,
        model: HFModelConfig,
        engine: FSDPEngineConfig | TorchTitanEngineConfig,
        share_prompts: bool = False,
        router_replay: bool = False,
    ) -> PassSettings:
        """From the ``model`` section and that of the engine."""
        chunked, rows = engine.entropy_from_logits_with_chunking, engine.entropy_from_logits_chunk_size
        fused, backend = model.use_fused_kernels, model.fused_kernel_options.impl_backend
        pads, bucket = engine.pad_to_length, engine.pad_to_length_bucket
        multiple = bucket if pads else 1
        if multiple < 1:
            raise ConfigError(
                "a bucket has at least one token", key=key_of(engine, "pad_to_length_bucket"), got=multiple
            )
        if multiple > 1 and not model.use_remove_padding:
            why = f"has no effect on padded rows: set {key_of(model, 'use_remove_padding')}=true"
            notice(key_of(engine, "pad_to_length"), why)
        return cls(
            packed=bool(model.use_remove_padding),
            share_prompts=share_prompts and bool(model.use_remove_padding),
            fused_head=backend if fused else None,
            entropy_chunk=rows if chunked else None,
            entropy_again=bool(engine.entropy_checkpointing),
            multiple=multiple,
            packed_key=key_of(model, "use_remove_padding"),
            router_replay=router_replay,
        )


def compute_dtype(name: str | None, device: str) -> torch.dtype:
    """The dtype of matrix products; ``auto`` is float32 on a CPU and bf16 on an accelerator."""
    if name in (None, "auto"):
        return torch.float32 if device == "cpu" else torch.bfloat16
    return torch_dtype(name)


def recompute_activations(setting: bool | None, device: str) -> bool:
    """Gradient checkpointing; unset it is on where memory is scarce and compute is not."""
    return device != "cpu" if setting is None else setting


def check_settings(
    engine: FSDPEngineConfig | TorchTitanEngineConfig, trains: bool, device: str, scales_loss: bool = True
) -> None:
    """Refuse a dtype that this version cannot train in; switch torch to deterministic kernels where they are set."""
    if trains and not scales_loss and compute_dtype(engine.dtype, device) == torch.float16:
        raise NotBuiltError(
            "training in float16 needs loss scaling, which this engine does not have",
            key=key_of(engine, "dtype"),
            fix="Use bfloat16, or strategy=fsdp2.",
        )
    if trains and scales_loss and torch_dtype(engine.model_dtype) == torch.float16:
        raise ConfigError(
            "weights that are kept in float16 lose small updates",
            key=key_of(engine, "model_dtype"),
            got=engine.model_dtype,
            fix=f"Keep them in fp32, and set {key_of(engine, 'dtype')}=float16 for products in float16.",
        )
    if engine.full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)


SHARDING_SETTINGS = {
    "offload_policy": False,
    "reshard_after_forward": True,
    "fsdp_size": -1,
    "forward_prefetch": False,
    "use_no_sync_for_gradient_accumulation": False,
}
SHARED = {
    "ulysses_sequence_parallel_size": "sequences",
    "expert_parallel_size": "experts",
}
"""What peer processes may share, by the setting of how many do."""


def tell_sharding_settings(engine: FSDPEngineConfig | TorchTitanEngineConfig) -> None:
    """One notice per setting of a sharded backend that a full model on one device leaves without effect."""
    why = "has no effect on the plain engine: use strategy=fsdp2 with several processes"
    for name in (name for name, usual in SHARDING_SETTINGS.items() if engine[name] != usual):
        notice(key_of(engine, name), why)
    for name, what in SHARED.items():
        if engine[name] > 1:
            raise ConfigError(
                f"one process cannot share its {what} with others",
                key=key_of(engine, name),
                got=engine[name],
                fix="Run several processes with strategy=fsdp2, or leave it out.",
            )
    if engine.wrap_policy.min_num_params:
        notice(key_of(engine.wrap_policy, "min_num_params"), why)
