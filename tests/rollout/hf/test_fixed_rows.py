"""Linear layers give a row the same bits in every batch, on one thread and on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from verl.rollout.hf.fixed_rows import ROWS, FixedRows


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("wide", "out"), [(1152, 128), (1536, 576), (2048, 512), (64, 1000)])
def test_a_row_has_the_same_bits_whatever_is_in_its_batch(threads, wide, out, dtype):
    weight, x = torch.randn(out, wide).to(dtype), torch.randn(200, wide).to(dtype)
    with FixedRows():
        together = F.linear(x, weight)
        for count in (1, 7, 8, 16, 33, 64, 150):
            rows = torch.randperm(200)[:count]
            assert torch.equal(F.linear(x[rows], weight), together[rows]), count
    assert torch.allclose(
        together.float(), F.linear(x, weight).float(), rtol=2e-2 if dtype.itemsize < 4 else 1e-4, atol=1e-2
    )


def test_a_layer_keeps_its_shapes_its_bias_and_its_results():
    layer, x = nn.Linear(12, 5), torch.randn(2, 3, 12)
    with FixedRows():
        made = layer(x)
        many = layer(x.repeat(ROWS, 1, 1))
        none = layer(x[:0])
        product = torch.matmul(x, layer.weight.t())
    assert made.shape == (2, 3, 5) and torch.allclose(made, layer(x), atol=1e-6)
    assert torch.equal(many[-2:], made) and none.shape == (0, 3, 5)
    assert torch.equal(product, torch.matmul(x, layer.weight.t())), "other products are as they are"
