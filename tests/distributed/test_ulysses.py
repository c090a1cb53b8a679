"""Which KV heads each rank gets when they are fewer than ranks."""

from __future__ import annotations

import pytest
import torch

from verl.distributed.ulysses import repeated_heads


def heads(number: int) -> torch.Tensor:
    """(1, h, 1): every head is its own number."""
    return torch.arange(number).view(1, number, 1)


@pytest.mark.parametrize(
    ("kv_heads", "query_heads", "size", "expected"),
    [
        (4, 8, 2, [0, 1, 2, 3]),  # enough for every rank: as they are
        (2, 8, 4, [0, 0, 1, 1]),  # half as many as ranks: twice each
        (1, 8, 4, [0, 0, 0, 0]),
        (2, 6, 3, [0, 0, 0, 1, 1, 1]),  # neither divides the other: one per query head
    ],
)
def test_heads_are_repeated_as_often_as_needed(kv_heads, query_heads, size, expected):
    assert repeated_heads(heads(kv_heads), query_heads, size).flatten().tolist() == expected


@pytest.mark.parametrize(("kv_heads", "query_heads", "size"), [(4, 8, 2), (2, 8, 4), (1, 8, 8), (2, 6, 3), (6, 12, 4)])
def test_every_query_head_finds_its_own_key_value_head_on_its_rank(kv_heads, query_heads, size):
    """Of query heads that are split in order, number q belongs to KV head q // (H / h)."""
    split = repeated_heads(heads(kv_heads), query_heads, size).flatten().chunk(size)
    per_rank = query_heads // size
    for rank, own in enumerate(split):
        for query in range(per_rank):
            seen = own[query // (per_rank // len(own))]
            assert seen == (rank * per_rank + query) // (query_heads // kv_heads)
