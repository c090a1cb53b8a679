from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.engines.micro_batch import plan_padded
from verl.errors import ConfigError
from verl.planner.engines import CPU_TOKENS, LOGITS_BYTES, automatic_tokens

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(lengths=lengths, rows=st.integers(1, 8))
def test_every_row_is_in_exactly_one_micro_batch_of_at_most_that_many_rows(lengths, rows):
    plan = plan_padded(lengths, micro_batch_size=rows)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    assert all(len(part) == rows for part in plan[:-1]) and 1 <= len(plan[-1]) <= rows


@given(lengths=lengths, budget=st.integers(50, 200))
def test_a_token_budget_counts_the_padding(lengths, budget):
    plan = plan_padded(lengths, max_tokens=budget)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[row] for row in part) <= budget for part in plan)


def test_rows_of_like_length_go_together():
    assert plan_padded([9, 1, 8, 2], micro_batch_size=2) == [[0, 2], [3, 1]]
    assert plan_padded([9, 1, 8, 2], max_tokens=18) == [[0, 2], [3, 1]]
    assert plan_padded([3, 3, 3]) == [[0, 1, 2]]


def test_a_budget_below_the_longest_row_is_an_error_that_names_both_numbers():
    with pytest.raises(ConfigError, match=r"12 tokens.*Got 11"):
        plan_padded([4, 12], max_tokens=11)


def test_a_micro_batch_of_no_rows_is_an_error():
    with pytest.raises(ConfigError, match=r"at least one row"):
        plan_padded([4], micro_batch_size=0)


def test_the_automatic_budget_bounds_the_logits_and_lets_one_row_pass():
    assert automatic_tokens(100, "cpu", longest=10) == CPU_TOKENS
    assert automatic_tokens(150_000, "cpu", longest=10) == LOGITS_BYTES // 600_000
    assert automatic_tokens(0, "cpu", longest=10) == CPU_TOKENS
    assert automatic_tokens(150_000, "cpu", longest=5000) == 5000
    of_large = [automatic_tokens(100, "cpu", longest, num_parameters=135_000_000) for longest in (10, 100, 400, 2000)]
    assert of_large == [384, 400, 1024, 2000]
    assert automatic_tokens(100, "cuda", longest=10, num_parameters=135_000_000) == 16384
