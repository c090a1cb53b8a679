"""`ShardSpec` against cutting a real tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from verl.protocol import ShardSpec

WHOLE = torch.arange(7 * 5, dtype=torch.float16).reshape(7, 5)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_along_an_axis_lie_where_they_were_cut(axis, parts):
    low, specs = 0, []
    for piece in WHOLE.chunk(parts, axis):
        specs.append(ShardSpec.along(piece, WHOLE.shape, axis, low))
        assert torch.equal(WHOLE[specs[-1].slices], piece)
        assert (specs[-1].numel, specs[-1].num_bytes) == (piece.numel(), piece.nbytes)
        low += piece.shape[axis]
    assert sum(spec.num_bytes for spec in specs) == WHOLE.nbytes


def test_a_box_in_the_middle_and_one_of_no_elements():
    for (top, bottom), (left, right) in itertools.product([(2, 6), (3, 3)], [(1, 4), (0, 5)]):
        spec = ShardSpec.of(WHOLE[top:bottom, left:right], WHOLE.shape, (top, left))
        assert spec.bounds == [(top, bottom), (left, right)] and torch.equal(
            WHOLE[spec.slices], WHOLE[top:bottom, left:right]
        )


def test_a_tensor_alone_is_complete_and_specs_of_equal_boxes_are_one():
    assert ShardSpec.of(WHOLE) == ShardSpec((7, 5), "float16", (0, 0), (7, 5))
    assert len({ShardSpec.of(WHOLE), ShardSpec.along(WHOLE, (7, 5), 1, 0)}) == 1
    assert ShardSpec.of(torch.tensor(1)).bounds == [] and ShardSpec.of(torch.tensor(1)).numel == 1


def test_a_dtype_that_torch_has_not_is_refused():
    with pytest.raises(ValueError, match="no dtype of torch: Tensor"):
        _ = ShardSpec((1,), "Tensor", (0,), (1,)).torch_dtype
