"""What an engine makes of the dtype settings, and what it sets for the whole process."""

from __future__ import annotations

from typing import Any

import torch

from verl.device import torch_dtype
from verl.errors import NotBuiltError
from verl.metrics import notice


def compute_dtype(name: str | None, device: str) -> torch.dtype:
    """The dtype of matrix products; ``auto`` is float32 on a CPU and bf16 on an accelerator."""
    if name in (None, "auto"):
        return torch.float32 if device == "cpu" else torch.bfloat16
    return torch_dtype(name)


def recompute_activations(setting: bool | None, device: str) -> bool:
    """Gradient checkpointing; unset it is on where memory is scarce and compute is not."""
    return device != "cpu" if setting is None else setting


def check_settings(engine: Any, trains: bool, device: str) -> None:
    """Refuse a dtype that this version cannot train in; switch torch to deterministic kernels where asked for."""
    if trains and compute_dtype(engine.dtype, device) == torch.float16:
        raise NotBuiltError(
            "training in float16 needs loss scaling, which is not built yet",
            key="fsdp_config.dtype",
            fix="Use bfloat16.",
        )
    if engine.full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)


def tell_sharding_settings(engine: Any) -> None:
    """One notice per setting of a sharded backend that a whole model on one device leaves without effect."""
    usual = {
        "offload_policy": False,
        "reshard_after_forward": True,
        "fsdp_size": -1,
        "use_no_sync_for_gradient_accumulation": False,
    }
    for name, default in usual.items():
        if engine[name] != default:
            notice(
                f"fsdp_config.{name}", "has no effect on the plain engine: use strategy=fsdp2 with several processes"
            )
