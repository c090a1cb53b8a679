import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import outcome_batch, poison, ragged_mask
from verl.algorithms.advantages.grpo import grpo
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices

NORMALISED = [1.305580, -0.783348, 0.261116, -0.783348, 0, 0]
CENTRED = [0.625, -0.375, 0.125, -0.375, 0, 0]


def per_row(advantages, mask):
    """The one advantage of each row, after checking that it stands on every valid token and nowhere else."""
    rows = advantages.abs().amax(dim=-1) * advantages.sum(dim=-1).sign()
    torch.testing.assert_close(advantages, rows[:, None] * mask, atol=1e-12, rtol=0)
    return rows.tolist()


@pytest.mark.parametrize(
    ("normalise", "singleton", "expected"),
    [
        (True, "zero", [*NORMALISED, 0]),
        (True, "raw", [*NORMALISED, 0.699999]),
        (False, "zero", [*CENTRED, 0]),
        (False, "raw", [*CENTRED, 0.7]),
    ],
)
def test_worked_numbers(normalise, singleton, expected):
    rewards, mask, uids = outcome_batch()
    advantages, returns = grpo(rewards, mask, uids, norm_adv_by_std_in_grpo=normalise, singleton=singleton)
    assert per_row(advantages, mask) == pytest.approx(expected, abs=1e-5)
    assert torch.equal(advantages, returns)


def test_equal_rewards_give_exactly_zero_whatever_the_number_is():
    for value in (0.1, 1 / 3, 1e6 + 0.1):
        rewards = torch.full((3, 1), value)
        advantages, _ = grpo(rewards, torch.ones(3, 1), ["g"] * 3)
        assert advantages.tolist() == [[0], [0], [0]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_vectorised_groups_equal_a_loop_over_ragged_shuffled_groups(seed, rows, groups, normalise):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, 4, holes=False)
    rewards = torch.randn(rows, 4, generator=generator, dtype=torch.float64) * mask
    uids = [f"u{i}" for i in torch.randint(0, groups, (rows,), generator=generator).tolist()]
    scores, expected = rewards.sum(-1).numpy(), np.zeros(rows)
    for uid in set(uids):
        members = [i for i, u in enumerate(uids) if u == uid]
        part = scores[members]
        if len(members) > 1:
            expected[members] = part - part.mean()
            if normalise:
                expected[members] /= part.std(ddof=1) + 1e-6
    advantages, _ = grpo(rewards, mask, uids, norm_adv_by_std_in_grpo=normalise)
    torch.testing.assert_close(advantages, torch.tensor(expected)[:, None] * mask, atol=1e-9, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.floats(-5, 5), st.integers(0, 3))
def test_row_order_padding_junk_and_a_common_offset_do_not_matter(seed, rows, offset, padding):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, 3, dtype=torch.int64)
    mask[: rows // 2, 1:] = 0
    rewards = torch.zeros(rows, 3, dtype=torch.float64)
    rewards[:, 0] = torch.randn(rows, generator=generator, dtype=torch.float64)
    uids = np.array([i % 2 for i in range(rows)], dtype=object)
    base, _ = grpo(rewards, mask, uids)
    order = torch.randperm(rows, generator=generator)
    moved = rewards.clone()
    moved[:, 0] += offset
    wide = torch.nn.functional.pad(poison(moved, mask)[order], (0, padding), value=torch.nan)
    other, _ = grpo(wide, torch.nn.functional.pad(mask[order], (0, padding)), uids[order.numpy()])
    torch.testing.assert_close(other[:, :3], base[order], atol=1e-6, rtol=1e-6)


def test_a_reward_on_an_observation_after_the_last_token_still_counts():
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, _ = grpo(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5, 0.5, 0], [-0.5, -0.5, -0.5]]


def test_an_empty_response_gets_nothing_but_counts_in_its_group():
    rewards, mask = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1], [0, 0]])
    advantages, _ = grpo(rewards, mask, ["a"] * 3, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(advantages, torch.tensor([[2 / 3, 0], [-1 / 3, -1 / 3], [0, 0]]))


def test_a_row_with_a_nan_reward_leaves_its_group_alone():
    rewards, mask = torch.tensor([[1.0], [0.0], [torch.nan]]), torch.ones(3, 1)
    advantages, _ = grpo(rewards, mask, ["a"] * 3, norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5], [-0.5], [0]]
    alone, _ = grpo(rewards[1:], mask[1:], ["a"] * 2)
    assert alone.tolist() == [[0], [0]]


def test_a_group_of_one_is_told_once():
    rewards, mask, uids = outcome_batch()
    grpo(rewards, mask, uids)
    said = notices()["algorithm.singleton"]
    assert "others have more, so its other samples could not be scored (reward/unscorable)" in said
    assert "rollout.n" not in said, "four samples of a prompt are not too few"
    reset_notices()
    grpo(rewards[:2], mask[:2], ["a", "b"])
    assert "set actor_rollout_ref.rollout.n to 2 or more" in notices()["algorithm.singleton"]


def test_an_unknown_treatment_of_a_group_of_one_is_refused_by_key():
    rewards, mask, uids = outcome_batch()
    with pytest.raises(ConfigError, match=r"algorithm\.singleton.*'one'"):
        grpo(rewards, mask, uids, singleton="one")
