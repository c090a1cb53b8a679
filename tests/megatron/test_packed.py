"""Which tokens of a packed row a context-parallel rank of Transformer Engine has."""

from types import SimpleNamespace

import torch

from verl.engines.megatron import packed
from verl.engines.rows import MicroBatch
from verl.models.attention import PackedPlan, Segments


def test_every_sequence_is_cut_into_pieces_from_the_front_and_the_back():
    """Sequences of 5 and 4 tokens, at 0 and 5, over two ranks: padded to 8 and 4, and cut into four pieces each."""
    segments = Segments.separate([5, 4])
    parts = [packed.two_pieces(segments, rank, 2, 1) for rank in (0, 1)]
    assert [lengths for lengths, _ in parts] == [[8, 4]] * 2
    assert [tokens.tolist() for _, tokens in parts] == [[0, 1, -1, -1, 5, 8], [2, 3, 4, -1, 6, 7]]


def test_tensor_parallel_ranks_share_the_pieces_evenly():
    lengths, tokens = packed.two_pieces(Segments.separate([5, 4]), 1, 2, 2)
    assert lengths == [8, 8] and len(tokens) % 2 == 0


def test_one_rank_has_the_row_as_it_is():
    lengths, tokens = packed.two_pieces(Segments.separate([5, 4]), 0, 1, 2)
    assert lengths == [5, 4] and tokens.tolist() == list(range(9))


def test_listed_tokens_stay_with_the_positions_that_read_them():
    """Positions 1, 4 and 7 of the sequences above: the first rank has tokens 0, 1, 5, 8, the second 2, 3, 4, 6, 7."""
    order = torch.arange(9)[None]
    positions, listed = torch.tensor([1, 4, 7]), torch.tensor([[10, 11], [40, 41], [70, 71]])
    plan = PackedPlan(Segments.separate([5, 4]))
    micro = MicroBatch(
        torch.arange(2),
        order,
        order,
        positions,
        positions,
        positions,
        num_responses=9,
        candidates=listed,
        attention=plan,
    )
    parts = [packed.fast_part(micro, SimpleNamespace(rank=rank, size=2), 1)[0] for rank in (0, 1)]
    assert [part.labels.tolist() for part in parts] == [[1], [4, 7]]
    assert [part.candidates.tolist() for part in parts] == [[[10, 11]], [[40, 41], [70, 71]]]
