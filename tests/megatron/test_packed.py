"""Which tokens of a packed row a context-parallel rank of Transformer Engine has."""

from verl.engines.megatron import packed
from verl.models.attention import Segments


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
