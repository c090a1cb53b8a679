"""Cutting a stream of weights into buckets."""

from __future__ import annotations

import pytest
import torch

from verl.errors import RolloutError
from verl.weight_sync import chunk_weights


def weights(*sizes: int):
    for number, size in enumerate(sizes):
        yield f"w{number}", torch.zeros(size)


def test_buckets_hold_as_much_as_fits_and_a_large_tensor_travels_alone():
    chunks = list(chunk_weights(weights(10, 10, 5, 100, 1, 1), bucket_bytes=80, version=4))
    assert [[name for name, _ in c.tensors] for c in chunks] == [["w0", "w1"], ["w2"], ["w3"], ["w4", "w5"]]
    assert [c.num_bytes for c in chunks] == [80, 20, 400, 8]
    assert [c.last for c in chunks] == [False, False, False, True]
    assert {c.version for c in chunks} == {4}


def test_the_source_is_read_one_tensor_ahead_only():
    taken = []

    def source():
        for name, tensor in weights(4, 4, 4, 4):
            taken.append(name)
            yield name, tensor

    stream = chunk_weights(source(), bucket_bytes=16, version=0)
    next(stream)
    assert taken == ["w0", "w1"]


def test_nothing_to_send_and_buckets_without_room_are_errors():
    with pytest.raises(RolloutError, match="exported no weights"):
        list(chunk_weights([], 10, version=1))
    with pytest.raises(RolloutError, match="bucket"):
        list(chunk_weights(weights(1), 0, version=1))
