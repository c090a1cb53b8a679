"""Random operations on batches agree with an oracle of plain lists; more by hand."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.fuzzing.batches import OPERATIONS, Batches
from verl.protocol import DataProto


def test_random_operations_on_batches_do_what_they_do_to_lists():
    batches = Batches(Random(1))
    for _ in range(1500):
        batches.step()
    assert batches.counts.keys() == {operation.__name__ for operation in OPERATIONS}


def in_the_other_order(batch, times=2, interleave=True):
    rows = torch.arange(len(batch))
    return batch.select_idxs(rows.repeat(times) if interleave else rows.repeat_interleave(times))


def sharing_columns(batch, start=None, end=None, step=None):
    rows = range(len(batch))[slice(start, end, step)]
    return batch if rows == range(len(batch)) else batch.select_idxs(list(rows))


@pytest.mark.parametrize(
    "method, fault, operation", [("repeat", in_the_other_order, "repeat"), ("slice", sharing_columns, "")]
)
def test_an_operation_that_is_wrong_or_changes_another_batch_is_noticed(monkeypatch, method, fault, operation):
    monkeypatch.setattr(DataProto, method, fault)
    batches = Batches(Random(1))
    with pytest.raises(AssertionError, match=f"after {operation}"):
        for _ in range(3000):
            batches.step()
