from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.micro_batches import (
    agree_on_micro_batches,
    ceildiv,
    mini_batches,
    plan_micro_batches,
    restore_order,
    roundup_divisible,
    rows_per_mini_batch,
)
from verl.errors import ConfigError

LENGTHS = st.lists(st.integers(0, 100), min_size=1, max_size=60)


def test_token_budget_worked_examples():
    plan = plan_micro_batches([300, 200, 500, 100, 400], max_tokens=600)
    assert sorted(map(sorted, plan)) == [[0, 1], [2], [3, 4]]
    plan = plan_micro_batches([900] + [100] * 6, max_tokens=900)
    assert sorted(map(sorted, plan)) == [[0], [1, 2, 3, 4, 5, 6]]


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(0, 150), st.integers(1, 4), st.integers(1, 3))
def test_a_token_plan_covers_all_rows_within_the_budget(lengths, extra, min_count, multiple):
    lengths = (lengths * 12)[: max(len(lengths), 4) * multiple]  # single rows are then always a possible plan
    budget = max(*lengths, 1) + extra
    plan = plan_micro_batches(lengths, max_tokens=budget, min_count=min_count, count_multiple=multiple)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    assert all(part and sum(lengths[row] for row in part) <= budget for part in plan)
    assert len(plan) >= min_count and len(plan) % multiple == 0
    assert plan == plan_micro_batches(lengths, max_tokens=budget, min_count=min_count, count_multiple=multiple)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(0, 150))
def test_a_token_plan_is_no_longer_than_twice_the_unavoidable_number(lengths, extra):
    budget = max(*lengths, 1) + extra
    assert len(plan_micro_batches(lengths, max_tokens=budget)) <= 2 * max(1, ceildiv(sum(lengths), budget))


def test_equal_work_that_breaks_the_budget_is_repaired_without_a_further_micro_batch():
    """Two of 6 and three of 4 tokens fit into two bins of 12 only as 6+6 and 4+4+4."""
    plan = plan_micro_batches([6, 6, 4, 4, 4], max_tokens=12)
    assert sorted(map(sorted, plan)) == [[0, 1], [2, 3, 4]]


def test_equal_tokens_fit_where_neither_equal_work_nor_first_fit_does():
    """34 tokens into two bins of 17: 12+3+2 and 7+6+4. First fit puts 12+4 together, and needs a third for the last."""
    plan = plan_micro_batches([12, 7, 6, 4, 3, 2], max_tokens=17)
    assert sorted(map(sorted, plan)) == [[0, 4, 5], [1, 2, 3]]


def test_micro_batches_of_log_normal_rows_are_as_few_as_the_tokens_allow():
    generator = np.random.default_rng(0)
    for sigma in (0.3, 0.6, 0.9, 1.2):
        for _ in range(3):
            lengths = 128 + np.clip(np.exp(generator.normal(np.log(512), sigma, 512)).astype(int), 1, 4096)
            plan = plan_micro_batches(lengths.tolist(), max_tokens=8192)
            assert len(plan) == ceildiv(int(lengths.sum()), 8192)
            assert lengths.sum() >= 0.95 * len(plan) * 8192


def test_small_micro_batches_come_first_and_last():
    assert plan_micro_batches([40, 10, 30, 20], max_tokens=40, min_count=4) == [[1], [2], [0], [3]]


def test_a_row_count_takes_consecutive_rows():
    assert plan_micro_batches([1] * 5, micro_batch_size=2) == [[0, 1], [2, 3], [4]]
    assert plan_micro_batches([1] * 3) == [[0, 1, 2]]
    assert plan_micro_batches([], max_tokens=5) == plan_micro_batches([]) == []
    assert len(plan_micro_batches([1] * 5, micro_batch_size=4, min_count=3)) == 3


def test_groups_stay_whole_in_both_forms():
    groups = list("abcabcab")
    for plan in (
        plan_micro_batches([10] * 8, micro_batch_size=5, group_ids=groups),
        plan_micro_batches([10] * 8, max_tokens=50, group_ids=groups),
    ):
        assert sorted(row for part in plan for row in part) == list(range(8))
        homes = {(groups[row], number) for number, part in enumerate(plan) for row in part}
        assert len(homes) == 3
    with pytest.raises(ConfigError, match="group of 3 rows"):
        plan_micro_batches([10] * 8, micro_batch_size=2, group_ids=groups)
    with pytest.raises(ConfigError, match="group of sequences that stays together of 30 tokens"):
        plan_micro_batches([10] * 8, max_tokens=25, group_ids=groups)


def test_limits_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match="sequence of 11 tokens does not fit"):
        plan_micro_batches([3, 11], max_tokens=10)
    with pytest.raises(ConfigError, match="either by rows or by tokens"):
        plan_micro_batches([1], micro_batch_size=1, max_tokens=1)
    with pytest.raises(ConfigError, match="at least 1"):
        plan_micro_batches([1], micro_batch_size=0)
    with pytest.raises(ConfigError, match="3 micro-batches are needed"):
        plan_micro_batches([1, 1], max_tokens=10, min_count=3)


@settings(max_examples=40, deadline=None)
@given(LENGTHS)
def test_outputs_return_to_the_order_of_the_rows(lengths):
    plan = plan_micro_batches(lengths, max_tokens=max(*lengths, 1) + 20)
    rows = torch.arange(len(lengths))
    outputs = torch.cat([rows[part] for part in plan])
    assert torch.equal(outputs[restore_order(plan)], rows)


def plan_within_ten(lengths, count):
    return plan_micro_batches(lengths, max_tokens=10, min_count=count)


def test_ranks_agree_on_the_number_of_micro_batches():
    """Two ranks in lock step: each round every rank plans with the largest number of the round before."""
    ranks = [[5, 5, 5, 5], [9, 9, 1, 1]]
    plans = [partial(plan_within_ten, lengths) for lengths in ranks]
    count, rounds = 1, [1]
    while True:
        largest = max(len(plan(count)) for plan in plans)
        rounds.append(largest)
        if largest == count:
            break
        count = largest
    for plan in plans:
        answers = iter(rounds[1:])
        assert len(agree_on_micro_batches(plan, lambda _, answers=answers: next(answers))) == count
    assert len(agree_on_micro_batches(plans[0])) == 2


def test_mini_batches_are_consecutive_rows_of_every_epoch():
    assert mini_batches(6, 3) == [[0, 1, 2], [3, 4, 5]]
    assert mini_batches(4, 2, epochs=2) == [[0, 1], [2, 3]] * 2
    assert rows_per_mini_batch(ppo_mini_batch_size=64, samples_per_prompt=8) == 512


def test_rows_that_belong_together_are_shuffled_as_one():
    plan = mini_batches(12, 4, epochs=3, shuffle=True, seed=7, together=2)
    assert [sorted(row for part in plan[i : i + 3] for row in part) for i in (0, 3, 6)] == [list(range(12))] * 3
    assert all(first % 2 == 0 and second == first + 1 for part in plan for first, second in zip(part[::2], part[1::2]))
    assert plan[:3] != plan[3:6] and mini_batches(4, 2, together=2) == [[0, 1], [2, 3]]


def test_shuffled_mini_batches_depend_on_seed_and_epoch_only():
    plan = mini_batches(12, 4, epochs=2, shuffle=True, seed=7)
    assert plan == mini_batches(12, 4, epochs=2, shuffle=True, seed=7)
    for epoch in (plan[:3], plan[3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(12))
    assert plan[:3] != plan[3:]
    assert plan != mini_batches(12, 4, epochs=2, shuffle=True, seed=8)
    assert plan[:3] == mini_batches(12, 4, epochs=1, shuffle=True, seed=7)


@pytest.mark.parametrize(("rows", "size"), [(5, 2), (4, 8), (4, 0)])
def test_a_batch_that_does_not_divide_is_refused_by_key(rows, size):
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size.*does not divide"):
        mini_batches(rows, size)


def test_rounding_helpers():
    assert (ceildiv(7, 3), ceildiv(6, 3), roundup_divisible(7, 3), roundup_divisible(6, 3)) == (3, 2, 9, 6)
