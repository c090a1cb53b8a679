import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import poison, ragged_mask
from verl.algorithms.advantages.gae import gae
from verl.algorithms.masked import masked_mean, masked_var
from verl.metrics import notices
from verl.registry import ADVANTAGE_ESTIMATORS

REWARDS = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0.5]])
VALUES = torch.tensor([[0.2, 0.4, 0.6, 9.9], [0.1, 5.0, 0.3, 0.2]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])


def test_worked_numbers_with_an_observation_between_two_turns():
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.8)
    expected_returns = torch.tensor([[0.66816, 0.828, 1.0, 0], [0.33912, 0, 0.396, 0.5]])
    expected = torch.tensor([[1.049624, 0.761458, 0.560546, 0], [-0.593840, 0, -1.620790, -0.156999]])
    torch.testing.assert_close(returns, expected_returns, atol=1e-5, rtol=0)
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


def test_without_discount_the_returns_are_monte_carlo():
    _, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0)
    assert returns.tolist() == [pytest.approx([1, 1, 1, 0]), pytest.approx([0.5, 0, 0.5, 0.5])]


def test_raw_advantages_of_the_length_adaptive_example():
    """One row with V = 0.5 everywhere and lambda 0.75: returns minus values are the raw advantages."""
    rewards, values = torch.tensor([[0, 0, 0, 1.0]]), torch.full((1, 4), 0.5)
    _, returns = gae(rewards, values, torch.ones(1, 4), gamma=1.0, lam=0.75)
    torch.testing.assert_close(returns - 0.5, torch.tensor([[0.210938, 0.28125, 0.375, 0.5]]), atol=1e-6, rtol=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 9), st.integers(0, 5))
def test_order_of_rows_width_of_padding_and_junk_outside_the_mask_do_not_matter(seed, rows, width, padding):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, mask, gamma=0.99, lam=0.9)
    order = torch.randperm(rows, generator=generator)
    wide = [torch.nn.functional.pad(poison(x, mask)[order], (0, padding), value=torch.inf) for x in (rewards, values)]
    other, other_returns = gae(*wide, torch.nn.functional.pad(mask[order], (0, padding)), gamma=0.99, lam=0.9)
    torch.testing.assert_close(other[:, :width], advantages[order])
    torch.testing.assert_close(other_returns[:, :width], returns[order])
    assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all()
    if mask.sum() >= 2 and advantages.abs().max() > 1e-3:
        assert masked_mean(advantages, mask) == pytest.approx(0, abs=1e-6)
        raw = masked_var(returns - values, mask).item()
        assert masked_var(advantages, mask).item() == pytest.approx(raw / (raw + 1e-8), rel=1e-6)


def test_an_inserted_observation_changes_no_advantage():
    short = gae(REWARDS[:, :3], VALUES[:, :3], torch.ones(2, 3), gamma=0.9, lam=0.8)
    put = lambda x, junk: torch.cat([x[:, :1], torch.full((2, 2), junk), x[:, 1:3]], dim=1)
    mask = put(torch.ones(2, 3), 0.0)
    long = gae(put(REWARDS, 7.0), put(VALUES, torch.nan), mask, gamma=0.9, lam=0.8)
    for ours, theirs in zip(long, short):
        torch.testing.assert_close(ours[:, [0, 3, 4]], theirs)


@pytest.mark.parametrize("mask", [torch.zeros(2, 4), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])])
def test_degenerate_batches_give_finite_numbers_and_a_notice(mask):
    advantages, returns = gae(REWARDS, poison(VALUES, mask), mask, gamma=0.9, lam=0.8)
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()
    assert advantages.abs().max() < 1e-6
    assert "advantages" in notices()


def test_bfloat16_inputs_are_computed_in_float32():
    advantages, returns = gae(REWARDS.bfloat16(), VALUES.bfloat16(), MASK, gamma=0.9, lam=0.8)
    assert advantages.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("name", ["gae", "vapo", "reinforce_plus_plus"])
@pytest.mark.parametrize("form", [torch.tensor, np.float32, lambda x: torch.nn.Parameter(torch.tensor(x))])
def test_a_discount_is_a_number_in_any_form(name, form):
    """0.75 and 0.5 are exact in every float dtype."""
    estimator = ADVANTAGE_ESTIMATORS.get(name)
    expected = estimator(REWARDS, values=VALUES, response_mask=MASK, gamma=0.75, lam=0.5)
    found = estimator(REWARDS, values=VALUES, response_mask=MASK, gamma=form(0.75), lam=form(0.5))
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert not found[0].requires_grad
