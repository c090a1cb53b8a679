"""Batches of prompts and of supervised rows."""

from __future__ import annotations

import pytest
import torch

from verl.data.collate import collate_fn, sft_collate
from verl.errors import DataError


def test_tensors_are_stacked_and_all_else_becomes_object_arrays():
    rows = [
        {"x": torch.tensor([1, 2]), "ids": [1, 2], "name": "a"},
        {"x": torch.tensor([3, 4]), "ids": [3], "name": "b"},
    ]
    batch = collate_fn(rows)
    assert batch["x"].tolist() == [[1, 2], [3, 4]]
    assert batch["ids"].dtype == object and batch["ids"].shape == (2,) and batch["ids"][1] == [3]


def test_lists_of_one_length_stay_one_object_per_row():
    batch = collate_fn([{"ids": [1, 2]}, {"ids": [3, 4]}])
    assert batch["ids"].shape == (2,) and batch["ids"][0] == [1, 2]


def test_rows_with_different_columns_are_refused_by_name():
    with pytest.raises(DataError, match="different columns: extra"):
        collate_fn([{"a": 1}, {"a": 1, "extra": 2}])


def test_tensors_of_different_shapes_are_refused_by_name():
    with pytest.raises(DataError, match=r"column 'x' have different shapes: \(1,\), \(2,\)"):
        collate_fn([{"x": torch.zeros(1)}, {"x": torch.zeros(2)}])


def test_supervised_rows_are_padded_to_the_longest():
    rows = [
        {"input_ids": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([0, 1, 1])},
        {"input_ids": torch.tensor([8]), "loss_mask": torch.tensor([1])},
    ]
    batch = sft_collate(rows, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
