"""Running out of memory, told in the sizes that a person can change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl.engines.rows import MicroBatch
from verl.errors import EngineError

HOST_MESSAGE = "can't allocate memory"
"""How torch's host allocator says it, in a plain RuntimeError."""


@contextmanager
def explained(micro: MicroBatch) -> Iterator[None]:
    """Turn an out-of-memory error of the pass over ``micro`` into an `EngineError` with its sizes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            f"out of memory in a micro-batch of {len(micro.index)} rows and {micro.input_ids.numel()} tokens "
            f"({micro.labels.numel()} of them predicted): {str(error).strip().splitlines()[0] if str(error) else ''}",
            fix="Lower ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu with use_dynamic_bsz), set "
            "enable_gradient_checkpointing=true in the model's section, or shorten responses. No "
            "result depends on the first two.",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or HOST_MESSAGE in str(error)
