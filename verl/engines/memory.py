"""The error of running out of memory, in the sizes that a person can change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from verl.config import HFModelConfig, OptimizerConfig
from verl.config.rules.optimizers import TORCH
from verl.device import free_host_memory
from verl.engines.rows import MicroBatch
from verl.errors import EngineError, ModelError
from verl.models import folder
from verl.models.lora import LoraSettings

HOST_MESSAGE = "can't allocate memory"
"""How torch's host allocator says it, in a plain RuntimeError."""


def check_host(
    model: HFModelConfig, optim: OptimizerConfig | None, value_bytes: int, ranks: int, freezes_tower: bool = False
) -> None:
    """Refuse a model whose weights and training state alone exceed the free memory of the host.

    Only what is certain counts: the gradients of a model that trains all of its weights, and Adam's two moments.

    Args:
        optim: None for a frozen model.
        value_bytes: of one weight, as of its gradient and of each moment.
        ranks: processes that share the model.
        freezes_tower: its vision tower, of unknown size, has no gradient.

    Raises:
        ModelError: with the sizes. Without it the kernel kills the process, which says nothing.
    """
    if model.lora_base_quantization or not Path(model.path).is_dir():
        return
    weights = folder.num_weights(model.path) * value_bytes / ranks
    trains = optim is not None and not freezes_tower and LoraSettings.of(model) is None
    is_adam = optim is not None and optim.optimizer_impl == TORCH and optim.optimizer in ("Adam", "AdamW")
    moments = 2 * (trains and is_adam)
    needed, free = weights * (1 + trains + moments), free_host_memory()
    if needed <= free:
        return
    parts = ["its weights"] + ["their gradients"] * trains + ["the optimizer's moments"] * bool(moments)
    adapter = f"train an adapter (lora_rank=32: {weights / 1e9:.1f} GB), " if trains else ""
    raise ModelError(
        f"{', '.join(parts)} take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free",
        got=model.path,
        fix=f"Close other programs, {adapter}take a smaller model, or more machines.",
    )


@contextmanager
def explained(micro: MicroBatch) -> Iterator[None]:
    """Turn an out-of-memory error of the pass over ``micro`` into an `EngineError` with its sizes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        place = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        reason = str(error).strip().partition("\n")[0]
        raise EngineError(
            f"the {place} is out of memory in a micro-batch of {len(micro.index)} rows and "
            f"{micro.input_ids.numel()} tokens ({micro.labels.numel()} of them predicted): {reason}",
            fix="Lower ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu with use_dynamic_bsz), set "
            "enable_gradient_checkpointing=true in the model's section, or shorten responses. No "
            "result depends on the first two.",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or HOST_MESSAGE in str(error)
