"""Every rank runs the loop: what it does alone, and how rows are split."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.distributed import Ranks
from verl.protocol import DataProto
from verl.single_controller.spmd import Spmd
from verl.single_controller.spmd.context import split_rows


def batch_of(lengths: list[int]) -> DataProto:
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return DataProto.from_dict(tensors={"input_ids": mask * 5, "attention_mask": mask.long()})


class FirstOf(Ranks):
    """Rank ``rank`` of several whose peers all say what this one says."""

    def exchange(self, fact):
        return [fact] * self.size


@pytest.fixture
def logger():
    found = logging.getLogger("verl")
    level = found.level
    yield found
    found.setLevel(level)


def test_alone_it_changes_nothing(logger):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    level = logger.level
    ctx, batch = Spmd(Ranks(), seed=1), batch_of([3, 1])
    assert ctx.is_main and (ctx.rank, ctx.world_size) == (0, 1) and logger.level == level
    assert ctx.share(batch) is batch and ctx.sum(1.5, 2) == [1.5, 2.0]
    assert ctx.on_main(lambda: {"a": 1}) == {"a": 1} and ctx.only_main(lambda: batch) is batch
    assert torch.equal(torch.rand(1), expected)


def test_other_ranks_are_quiet_and_draw_their_own_torch_numbers_but_the_same_python_ones(logger):
    drawn = set()
    for rank in range(3):
        torch.manual_seed(3)
        random.seed(3)
        ctx = Spmd(Ranks(rank, 3), seed=1)
        drawn.add(torch.rand(1).item())
        assert random.random() == random.Random(3).random() and ctx.is_main == (rank == 0)
    assert len(drawn) == 3 and logger.level == logging.ERROR


def test_shares_are_disjoint_together_whole_and_keep_the_order_of_rows(logger):
    batch = batch_of([4, 9, 2, 7, 5])
    shares = [Spmd(FirstOf(rank, 3)).share(batch) for rank in range(3)]
    lengths = [share.batch["attention_mask"].sum(-1).tolist() for share in shares]
    # 9 7 5 go forth, 4 2 back
    assert lengths == [[9], [2, 7], [4, 5]]


def test_rows_may_go_to_ranks_in_turn(logger):
    batch = batch_of([4, 9, 2, 7, 5])
    shares = [Spmd(FirstOf(rank, 3)).share(batch, balance=False) for rank in range(3)]
    # whatever their length, rows go to ranks forth and back
    assert [share.batch["attention_mask"].sum(-1).tolist() for share in shares] == [[4], [9, 5], [2, 7]]


def test_a_run_that_goes_on_gives_each_rank_numbers_of_its_step(logger):
    drawn = set()
    for step in (0, 5):
        for rank in (1, 2):
            Spmd(Ranks(rank, 3), seed=1).set_generator(step)
            drawn.add(torch.rand(1).item())
    assert len(drawn) == 4


def test_fewer_rows_than_ranks_leave_a_rank_with_an_empty_batch(logger):
    assert [len(Spmd(FirstOf(rank, 3)).share(batch_of([2, 3]))) for rank in range(3)] == [1, 1, 0]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8))
def test_every_row_goes_to_one_rank_and_ranks_differ_by_one_row_and_one_longest_row(lengths, ranks):
    parts = split_rows(lengths, ranks)
    assert sorted(row for rows in parts for row in rows) == list(range(len(lengths)))
    counts = [len(rows) for rows in parts]
    assert max(counts) - min(counts) <= 1 and all(rows == sorted(rows) for rows in parts)
    if len(lengths) % (2 * ranks) == 0:
        tokens = [sum(lengths[row] for row in rows) for rows in parts]
        assert max(tokens) - min(tokens) <= max(lengths, default=0)
