"""Out of memory: told in sizes, and nothing else is taken for it."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.harness.engines import model_dir, ragged_batch
from verl import device
from verl.config import HFModelConfig, OptimizerConfig
from verl.engines import memory
from verl.engines.rows import AlignedRows, MicroBatch
from verl.errors import EngineError, ModelError
from verl.models.folder import num_weights


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"), "device"),
        (MemoryError(), "host"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you ..."), "host"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_the_message_has_the_place_the_sizes_and_what_to_lower(error, place):
    micro = AlignedRows.of(ragged_batch()).micro_batch([0, 1], "cpu")
    with pytest.raises(EngineError) as caught, memory.explained(micro):
        raise error
    told = str(caught.value)
    assert (
        f"the {place} is out of memory in a micro-batch of 2 rows" in told
        and f"{micro.input_ids.numel()} tokens" in told
        and f"{len(micro.labels)} of them" in told
    )
    assert "ppo_micro_batch_size_per_gpu" in told and caught.value.__cause__ is error and "\n" not in told


def test_a_real_allocation_that_cannot_be_is_recognised():
    with pytest.raises(EngineError, match="out of memory"), memory.explained(MicroBatch.filler("cpu")):
        torch.empty(1 << 60)


@pytest.mark.parametrize(
    "model, optim, tower, values",
    [
        ({}, {}, False, 4),
        ({}, None, False, 1),
        ({"lora_rank": 4}, {}, False, 1),
        ({}, {}, True, 1),
        ({}, {"optimizer": "SGD"}, False, 2),
        ({}, {"optimizer": "AdamW4bit", "optimizer_impl": "torchao.optim"}, False, 2),
        ({}, {"optimizer": "AdamW8bit", "optimizer_impl": "bitsandbytes.optim"}, False, 2),
    ],
)
def test_only_what_every_step_needs_is_counted_before_training(monkeypatch, tmp_path, model, optim, tower, values):
    """Two ranks share the weights; a value has 4 bytes."""
    section = HFModelConfig(path=str(model_dir(tmp_path)), **model)
    optimizer = None if optim is None else OptimizerConfig(**optim)
    needed = 4 * values * num_weights(section.path) // 2
    monkeypatch.setattr(memory, "free_host_memory", lambda: needed)
    memory.check_host(section, optimizer, 4, 2, tower)
    monkeypatch.setattr(memory, "free_host_memory", lambda: needed - 1)
    with pytest.raises(ModelError, match="GB of memory"):
        memory.check_host(section, optimizer, 4, 2, tower)


@pytest.mark.parametrize("limit, free", [("3000000", 2_500_000), ("max", None)])
@pytest.mark.parametrize("swap", [0, 7_000_000])
def test_a_control_groups_limit_is_the_memory_there_is(monkeypatch, tmp_path, limit, free, swap):
    """Of 3 MB 1 MB is in use, half of which is page cache, which the kernel drops where memory is needed."""
    machine = psutil.virtual_memory().total
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap))
    for name, text in (("max", limit), ("current", "1000000"), ("stat", "anon 5\nactive_file 4\ninactive_file 499996")):
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    measured = device.free_host_memory(tmp_path) - swap
    assert measured == free if free else 3_000_000 < measured < machine


def test_other_errors_pass_as_they_are():
    with pytest.raises(RuntimeError, match="shape") as caught, memory.explained(MicroBatch.filler("cpu")):
        raise RuntimeError("shape mismatch")
    assert not isinstance(caught.value, EngineError)
