"""Out of memory: told in sizes, and nothing else is taken for it."""

from __future__ import annotations

import pytest
import torch

from tests.harness.engines import ragged_batch
from verl.engines import memory
from verl.engines.rows import AlignedRows, MicroBatch
from verl.errors import EngineError


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_message_has_the_sizes_and_what_to_lower(error):
    micro = AlignedRows.of(ragged_batch()).micro_batch([0, 1], "cpu")
    with pytest.raises(EngineError) as caught, memory.explained(micro):
        raise error
    told = str(caught.value)
    assert "2 rows" in told and f"{micro.input_ids.numel()} tokens" in told and f"{len(micro.labels)} of them" in told
    assert "ppo_micro_batch_size_per_gpu" in told and caught.value.__cause__ is error and "\n" not in told


def test_a_real_allocation_that_cannot_be_is_recognised():
    with pytest.raises(EngineError, match="out of memory"), memory.explained(MicroBatch.filler("cpu")):
        torch.empty(1 << 60)


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match="shape") as caught, memory.explained(MicroBatch.filler("cpu")):
        raise RuntimeError("shape mismatch")
    assert not isinstance(caught.value, EngineError)
