"""rloo, opo, gpg and reinforce_plus_plus_baseline: one advantage per response, from its group."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import LENGTHS, SCORES, outcome_batch, poison
from verl.algorithms.advantages.gpg import gpg
from verl.algorithms.advantages.opo import opo
from verl.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from verl.algorithms.advantages.rloo import rloo
from verl.errors import ConfigError
from verl.registry import ADVANTAGE_ESTIMATORS

ESTIMATORS = [rloo, opo, gpg, reinforce_plus_plus_baseline]


def compat_gpg(*args, **kwargs):
    return gpg(*args, **kwargs, gpg_alpha="compat")


def first_tokens(estimator, **settings_):
    rewards, mask, uids = outcome_batch()
    advantages, returns = estimator(rewards, mask, uids, **settings_)
    assert torch.equal(advantages, returns) and advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, advantages[:, :1] * mask)
    return advantages[:, 0].tolist()


@pytest.mark.parametrize(
    ("estimator", "expected", "raw"),
    [
        (rloo, [0.833333, -0.5, 0.166667, -0.5, 0, 0], 0.7),
        (opo, [0.5, -0.5, 0, -0.5, 0, 0], 0.7),
        (compat_gpg, [0.875, -0.525, 0.175, -0.525, 0, 0], 0.98),
        (gpg, [1.09375, -0.65625, 0.21875, -0.65625, 0, 0], 1.225),  # alpha 1.75: three of seven carry no gradient
    ],
)
def test_worked_numbers_with_both_treatments_of_a_group_of_one(estimator, expected, raw):
    assert first_tokens(estimator) == pytest.approx([*expected, 0], abs=1e-6)
    assert first_tokens(estimator, singleton="raw") == pytest.approx([*expected, raw], abs=1e-6)


def test_baseline_worked_numbers_are_whitened_over_tokens():
    raw = first_tokens(reinforce_plus_plus_baseline, singleton="raw")
    expected = [1.346240, -1.373437, -0.013598, -1.373437, -0.353558, -0.353558, 1.550216]
    assert raw == pytest.approx(expected, abs=1e-5)
    centred = np.array([0.625, -0.375, 0.125, -0.375, 0, 0, 0])
    tokens = np.repeat(centred, LENGTHS)
    expected = (centred - tokens.mean()) / tokens.std(ddof=1)
    assert first_tokens(reinforce_plus_plus_baseline) == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_registered_names_lead_here():
    for name in ("rloo", "rloo_vectorized"):
        assert ADVANTAGE_ESTIMATORS.get(name) is rloo
    assert ADVANTAGE_ESTIMATORS.get("opo") is opo and ADVANTAGE_ESTIMATORS.get("gpg") is gpg


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.floats(-5, 5), st.sampled_from(ESTIMATORS))
def test_row_order_junk_and_a_common_offset_do_not_matter(seed, rows, offset, estimator):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(3)[None] < torch.randint(1, 4, (rows, 1), generator=generator)).long()
    rewards = torch.zeros(rows, 3, dtype=torch.float64)
    rewards[:, 0] = torch.randint(0, 3, (rows,), generator=generator).double()
    uids = np.array([i % 2 for i in range(rows)], dtype=object)
    base, _ = estimator(rewards, mask, uids)
    moved = rewards.clone()
    moved[:, 0] += offset
    order = torch.randperm(rows, generator=generator)
    other, _ = estimator(poison(moved, mask)[order], mask[order], uids[order.numpy()])
    torch.testing.assert_close(other, base[order], atol=1e-6, rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(seed, rows):
    scores = torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages, _ = rloo(scores, torch.ones(rows, 1), ["a"] * rows)
    others = [(scores.sum() - s) / (rows - 1) for s in scores[:, 0]]
    torch.testing.assert_close(advantages[:, 0], scores[:, 0] - torch.stack(others))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_degenerate_groups_give_finite_numbers(estimator):
    ones, empty = torch.ones(3, 2), torch.zeros(3, 2)
    for rewards, mask in ((ones, ones), (ones, empty), (torch.zeros(3, 2), ones), (ones * torch.nan, ones)):
        advantages, _ = estimator(rewards, mask, ["a", "a", "b"])
        assert torch.isfinite(advantages).all() and advantages.abs().max() < 1e-6


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_row_with_a_nan_reward_leaves_its_group_alone(estimator):
    rewards, mask = torch.tensor([[1.0], [0.0], [0.5], [torch.nan]]), torch.ones(4, 1)
    with_nan, _ = estimator(rewards, mask, ["a"] * 4)
    without, _ = estimator(rewards[:3], mask[:3], ["a"] * 3)
    torch.testing.assert_close(with_nan[:3], without)
    assert with_nan[3] == 0


def test_gpg_scales_by_what_is_asked_and_refuses_other_corrections():
    rewards, mask, uids = outcome_batch()
    plain, _ = gpg(rewards, mask, uids)
    scaled, _ = gpg(rewards, mask, uids, alpha=3.0, f_norm=2.0)
    torch.testing.assert_close(scaled, plain * 1.5)
    with pytest.raises(ConfigError, match=r"gpg_alpha.*paper, compat"):
        gpg(rewards, mask, uids, gpg_alpha="none")


def test_the_length_weighted_baseline_is_the_one_of_least_variance():
    """b = sum l R / sum l minimises sum l (R - b)^2, the variance if the squared gradient grows with length."""
    rewards, mask, uids = outcome_batch()
    advantages, _ = opo(rewards, mask, uids)
    baseline = SCORES[0] - advantages[0, 0].item()
    variance = lambda b: sum(length * (score - b) ** 2 for length, score in zip(LENGTHS[:4], SCORES[:4]))
    assert variance(baseline) <= min(variance(baseline + 0.01), variance(baseline - 0.01))
