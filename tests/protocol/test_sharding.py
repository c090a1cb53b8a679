"""`ShardSpec` against cutting a real tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from verl.protocol import ShardSpec
from verl.protocol.sharding import make_up

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


def boxes_in(shape):
    """Boxes of a small tensor that may be empty or lie partly outside."""
    spans = [st.tuples(st.integers(-1, size), st.integers(0, size)) for size in shape]
    made = st.tuples(*spans).map(lambda given: ShardSpec(shape, "int8", *map(tuple, zip(*given))))
    return st.lists(made, max_size=5)


@given(boxes_in((3, 2)) | boxes_in((4,)))
@example([ShardSpec((4,), "int8", (0,), (3,)), ShardSpec((4,), "int8", (2,), (1,))])  # as many elements, one twice
@example([ShardSpec((3, 2), "int8", (0, 0), (3, 1)), ShardSpec((3, 2), "int8", (0, 1), (3, 1))])
@example([ShardSpec((), "int8", (), ())])
def test_boxes_make_up_a_tensor_where_each_element_is_in_one(boxes):
    shape = boxes[0].shape if boxes else (2,)
    counts = torch.zeros(shape, dtype=torch.int8)
    inside = all(low >= 0 and high <= size for box in boxes for (low, high), size in zip(box.bounds, shape))
    for box in boxes if inside else []:
        counts[box.slices] += 1
    assert make_up(boxes, shape) == (inside and bool(counts.eq(1).all()))
