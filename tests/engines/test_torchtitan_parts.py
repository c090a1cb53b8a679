"""Parts of the TorchTitan engine that need no process group: the order of a pipeline, layers of stages, experts."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from verl.engines.rows import MicroBatch
from verl.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="TorchTitan is not installed")


def test_a_stage_opens_as_many_micro_batches_as_there_are_stages_from_it_on():
    from verl.engines.torchtitan.pipeline import one_forward_one_backward

    orders = [" ".join(f"{what[0]}{n}" for what, n in one_forward_one_backward(stage, 3, 4)) for stage in range(3)]
    assert orders == [
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ]
    assert list(one_forward_one_backward(0, 4, 1)) == [("forward", 0), ("backward", 0)]
    assert list(one_forward_one_backward(0, 4, 0)) == []


def test_stages_divide_the_layers_and_count_embedding_and_head_as_one_each():
    from verl.engines.torchtitan.parallel import TitanSizes

    def layers(stages: int, count: int) -> list[list[int]]:
        sizes = TitanSizes(1, 1, 1, stages, 1, 1, None, None)
        return [list(sizes.layers_here(stage, count)) for stage in range(stages)]

    assert layers(1, 3) == [[0, 1, 2]]
    assert layers(2, 4) == [[0, 1], [2, 3]]
    assert layers(2, 5) == [[0, 1, 2], [3, 4]]
    assert layers(4, 6) == [[0], [1, 2], [3, 4], [5]]
    assert layers(3, 3) == [[0], [1, 2], []]


def test_each_row_goes_through_its_expert_and_rows_of_none_give_zero():
    from verl.engines.torchtitan.modules import experts_of_rows

    # One hidden unit, so that down(silu(gate x) * up x) can be written out; the middle expert has no row.
    gate_up = torch.tensor([[[1.0], [2.0]], [[5.0], [7.0]], [[-1.0], [3.0]]], requires_grad=True)
    down = torch.tensor([[[1.0]], [[11.0]], [[0.5]]], requires_grad=True)
    rows, counts = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([1, 0, 2])
    out = experts_of_rows(rows, counts, gate_up, down)

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    expected = [silu(1.0) * 2, silu(-2.0) * 6 * 0.5, silu(-3.0) * 9 * 0.5, 0.0]
    assert out.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    out.sum().backward()
    assert gate_up.grad is not None and gate_up.grad[1].abs().max() == 0  # a gradient of zeros, and not none


def test_padded_rows_become_longer_without_moving_what_is_read():
    ids = torch.arange(6).view(2, 3)
    micro = MicroBatch(
        index=torch.arange(2),
        input_ids=ids,
        position_ids=torch.arange(3).expand(2, 3),
        positions=torch.tensor([1, 5]),
        labels=torch.zeros(2, dtype=torch.long),
        places=torch.arange(2),
        num_responses=1,
    )
    longer = micro.lengthened(4)
    assert longer.input_ids.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]
    assert longer.input_ids.flatten()[longer.positions].tolist() == [1, 5]
    assert longer.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert micro.lengthened(3) is micro


def test_a_torch_that_lacks_what_it_imports_is_named(monkeypatch):
    """TorchTitan 0.3 takes names from torch that 2.11, the oldest that the library takes, does not have."""
    from verl.engines.torchtitan import package

    def missing(name):
        raise ImportError("cannot import name 'DataParallelMeshDims' from 'torch.distributed.fsdp'")

    monkeypatch.setattr(package.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"(?s)'DataParallelMeshDims'.*torch 2\..*Install torch 2\.13"):
        package.import_torchtitan("models.qwen3", "cpu")
