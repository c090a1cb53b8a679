import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import poison, ragged_mask
from verl.algorithms.masked import zero_outside
from verl.algorithms.recurrence import discounted_sum, rewards_to_go


def by_hand(values, mask, discount):
    """The definition, one row and one token at a time."""
    sums = torch.zeros_like(values)
    for row in range(len(values)):
        running = 0.0
        for t in reversed(range(values.shape[1])):
            if mask[row, t]:
                running = values[row, t] + discount * running
            sums[row, t] = running
    return sums


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 19), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_all_rows_at_once_equal_the_definition(seed, rows, width, discount):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(discounted_sum(poison(values, mask), mask, discount), by_hand(values, mask, discount))
    torch.testing.assert_close(rewards_to_go(values * mask), by_hand(values, mask, 1.0))


def test_masked_tokens_are_transparent():
    values, mask = torch.tensor([[1.0, 9.0, 2.0, 9.0]]), torch.tensor([[1, 0, 1, 0]])
    assert discounted_sum(values, mask, 0.5).tolist() == [[2.0, 2.0, 2.0, 0.0]]


@pytest.mark.parametrize("padding", [1, 3, 40])
def test_padding_on_the_right_changes_no_bit(padding):
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(5, 13, generator=generator), ragged_mask(generator, 5, 13)
    wide = torch.nn.functional.pad(values, (0, padding), value=torch.nan)
    wide_mask = torch.nn.functional.pad(mask, (0, padding))
    narrow = discounted_sum(values, mask, 0.97)
    assert torch.equal(discounted_sum(wide, wide_mask, 0.97)[:, :13], narrow)
    to_go = rewards_to_go(zero_outside(wide, wide_mask))
    assert torch.equal(to_go[:, :13], rewards_to_go(zero_outside(values, mask)))
