"""Padding to a divisor, folding and collating."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import BatchError
from verl.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.protocol.columns import divisors, even_bounds


def numbered(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"uid": [str(i) for i in range(rows)]}, {"metrics": {"a": 1}})


def test_padding_repeats_rows_from_the_start_as_often_as_needed():
    padded, added = pad_dataproto_to_divisor(numbered(2), 5)
    assert added == 3 and padded.batch["x"].tolist() == [0, 1, 0, 1, 0]
    assert padded.non_tensor_batch["uid"].tolist() == ["0", "1", "0", "1", "0"]
    assert padded.meta_info == {"metrics": {"a": 1}}
    assert unpad_dataproto(padded, added).batch["x"].tolist() == [0, 1]


def test_a_batch_that_divides_is_returned_as_it_is():
    data = numbered(4)
    assert pad_dataproto_to_divisor(data, 2) == (data, 0) and unpad_dataproto(data, 0) is data
    with pytest.raises(BatchError):
        pad_dataproto_to_divisor(data, 0)


@given(rows=st.integers(1, 40), divisor=st.integers(1, 50))
def test_padding_and_unpadding_give_the_batch_back(rows, divisor):
    padded, added = pad_dataproto_to_divisor(numbered(rows), divisor)
    assert len(padded) % divisor == 0 and 0 <= added < divisor
    assert unpad_dataproto(padded, added).batch["x"].tolist() == list(range(rows))


@given(rows=st.integers(0, 60), parts=st.integers(1, 20))
def test_even_cuts_cover_all_rows_with_sizes_that_differ_by_at_most_one(rows, parts):
    cuts = even_bounds(rows, parts)
    assert [i for a, b in cuts for i in range(a, b)] == list(range(rows)) and len(cuts) == parts
    sizes = [b - a for a, b in cuts]
    assert max(sizes) - min(sizes) <= 1


def test_the_nearest_divisors_are_offered():
    assert divisors(12, 5) == [1, 2, 3, 4, 6, 12]
    assert divisors(1024, 100, limit=3) == [32, 64, 128]


def test_folding_groups_rows_as_views_and_unfolding_reverses_it():
    data = DataProto.from_dict({"x": torch.arange(12).reshape(6, 2)}, {"uid": list("abcdef")})
    folded = fold_batch_dim(data, 2)
    assert len(folded) == 2 and folded.batch["x"].shape == (2, 3, 2)
    assert folded.non_tensor_batch["uid"].tolist() == [["a", "b", "c"], ["d", "e", "f"]]
    assert folded.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    back = unfold_batch_dim(folded)
    assert torch.equal(back.batch["x"], data.batch["x"]) and back.non_tensor_batch["uid"].tolist() == list("abcdef")
    with pytest.raises(BatchError, match=r"1, 2, 3, 6"):
        fold_batch_dim(data, 4)
    with pytest.raises(BatchError, match="first 2 axes"):
        unfold_batch_dim(data)


def test_collating_rows_gives_the_batch_they_came_from():
    data = DataProto.from_dict({"x": torch.arange(6).reshape(3, 2)}, {"ids": [[1, 2], [3, 4], [5, 6]]})
    again = collate_fn([data[i] for i in range(3)])
    assert torch.equal(again.batch["x"], data.batch["x"]) and again.non_tensor_batch["ids"].shape == (3,)
    only_arrays = collate_fn([DataProto(non_tensor_batch={"a": np.arange(2)})[i] for i in range(2)])
    assert only_arrays.batch is None and only_arrays.non_tensor_batch["a"].tolist() == [0, 1]
    with pytest.raises(BatchError):
        collate_fn([])
