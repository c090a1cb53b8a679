"""Worked numbers of the estimators that look at more than one reward per response, or only at the best of a group."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.algorithms import outcome_batch, poison
from verl.algorithms.advantages.gdpo import gdpo
from verl.algorithms.advantages.grpo import grpo
from verl.algorithms.advantages.grpo_passk import grpo_passk
from verl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from verl.algorithms.advantages.prime import prime
from verl.algorithms.advantages.vapo import length_adaptive_lam, vapo
from verl.algorithms.aggregation import agg_loss
from verl.errors import ConfigError


def column(advantages):
    return advantages[:, 0].tolist()


def test_passk_rewards_the_best_response_for_its_lead():
    rewards, mask, uids = outcome_batch()
    plain, returns = grpo_passk(rewards, mask, uids, norm_adv_by_std_in_grpo=False)
    assert column(plain) == pytest.approx([0.5, 0, 0, 0, 0, 0, 0]) and torch.equal(plain, returns)
    normed, _ = grpo_passk(poison(rewards, mask), mask, uids)
    assert column(normed) == pytest.approx([1.044464, 0, 0, 0, 0, 0, 0], abs=1e-6)
    assert normed[0].tolist() == pytest.approx([1.044464] * 3 + [0], abs=1e-6)


def test_passk_refuses_a_group_of_one_under_upstreams_convention():
    rewards, mask, uids = outcome_batch()
    with pytest.raises(ValueError, match=r"algorithm\.singleton.*single scored response"):
        grpo_passk(rewards, mask, uids, singleton="raw")
    assert column(grpo_passk(rewards[:6], mask[:6], uids[:6], singleton="raw")[0])[0] > 1


def test_passk_leaves_an_unscored_row_out():
    rewards, mask = torch.tensor([[1.0], [0.25], [torch.nan], [torch.nan]]), torch.ones(4, 1)
    advantages, _ = grpo_passk(rewards, mask, ["a", "a", "a", "b"], norm_adv_by_std_in_grpo=False)
    assert column(advantages) == pytest.approx([0.75, 0, 0, 0])


GDPO = SimpleNamespace(gdpo_reward_keys=["accuracy", "format"], gdpo_reward_weights=None)
COLUMNS = {
    "accuracy": np.array([1, 0, 1, 0, 1, 1], dtype=object),
    "format": np.array([1, 1, 0, 0, 0, 1.0], dtype=object),
}


def test_gdpo_normalises_each_reward_apart():
    groups, zeros, mask = list("aaaabb"), torch.zeros(6, 2), torch.ones(6, 2)
    advantages, _ = gdpo(zeros, mask, groups, config=GDPO, non_tensor_batch=COLUMNS)
    assert column(advantages) == pytest.approx([1.535299, 0, 0, -1.535299, -0.626783, 0.626783], abs=1e-5)
    total = torch.zeros(6, 2)
    total[:, 0] = torch.tensor([2.0, 1, 1, 0, 1, 2])
    together, _ = grpo(total, mask, groups)
    assert column(together) == pytest.approx([1.2247, 0, 0, -1.2247, -0.7071, 0.7071], abs=1e-4)


def test_gdpo_weighs_its_rewards_and_counts_tokens():
    config = SimpleNamespace(gdpo_reward_keys=["accuracy", "format"], gdpo_reward_weights=[1.0, 0.0])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1], [1, 1]])
    advantages, _ = gdpo(torch.zeros(6, 2), mask, list("aaaabb"), config=config, non_tensor_batch=COLUMNS)
    step = 0.5 / (math.sqrt(1 / 3) + 1e-6)  # group a: 1, 0, 1, 0
    tokens = np.array([step] * 2 + [-step] + [step] * 2 + [-step] + [0.0] * 4)
    expected = (np.array([step, -step, step, -step, 0, 0]) - tokens.mean()) / tokens.std(ddof=1)
    assert column(advantages) == pytest.approx(expected.tolist(), abs=1e-5)


def test_gdpo_names_what_is_wrong_with_its_rewards():
    call = lambda **settings: gdpo(
        torch.zeros(6, 2), torch.ones(6, 2), list("aaaabb"), non_tensor_batch=COLUMNS,
        config=SimpleNamespace(**{"gdpo_reward_keys": ["accuracy"], "gdpo_reward_weights": None, **settings}),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"gdpo_reward_keys.*'accurac'.*Did you mean 'accuracy'"):
        call(gdpo_reward_keys=["accurac"])
    with pytest.raises(ConfigError, match=r"gdpo_reward_weights.*1 rewards have 2 weights|1 rewards have 2 weights"):
        call(gdpo_reward_weights=[1, 2])
    with pytest.raises(ConfigError, match="none is named"):
        call(gdpo_reward_keys=None)


OTB = {
    "token_level_rewards": torch.tensor([[0, 0, 1.0], [0, 0.2, 0]]),
    "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    "index": ["a", "a"],
    "old_log_probs": torch.tensor([[0.5, 0.8, 0.9], [0.4, 0.5, 0.5]]).log(),
    "sum_pi_squared": torch.tensor([[0.4, 0.7, 0.82], [0.3, 0.4, 0.5]]),
}
OTB_EXPECTED = torch.tensor([[0.444444, 0.514286, 0], [-0.355556, -0.285714, 0]])


def poisoned(**tensors):
    mask = tensors["response_mask"]
    return {k: poison(x, mask) if torch.is_tensor(x) and k != "response_mask" else x for k, x in tensors.items()}


def test_optimal_token_baseline():
    advantages, returns = optimal_token_baseline(**poisoned(**OTB))
    torch.testing.assert_close(advantages, OTB_EXPECTED, atol=1e-5, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([[1, 1, 1], [0.2, 0.2, 0]]))
    tail, _ = optimal_token_baseline(**OTB, handle_zero_tail=True)
    assert tail[0, 2].item() == pytest.approx(1) and torch.equal(tail[:, :2], advantages[:, :2])


def test_optimal_token_baseline_squares_the_importance_weights():
    """With weights 2 in the first row its W is four times as large: b_0 = (1 * 1.6 + .2 * .5) / 2.1."""
    weights = torch.tensor([[2.0, 2, 2], [1, 1, torch.nan]])
    advantages, _ = optimal_token_baseline(**OTB, rollout_is_weights=weights)
    assert advantages[0, 0].item() == pytest.approx(1 - 1.7 / 2.1)


def test_equal_weights_make_it_the_mean_baseline_and_a_group_of_one_follows_the_setting():
    batch = {**OTB, "old_log_probs": torch.full((2, 3), -1.0), "sum_pi_squared": torch.full((2, 3), 0.5)}
    batch["response_mask"] = torch.tensor([[1, 1, 0], [1, 1, 0]])
    advantages, _ = optimal_token_baseline(**batch)
    torch.testing.assert_close(advantages, torch.tensor([[-0.1, -0.1, 0], [0.1, 0.1, 0]]))
    alone = {**OTB, "index": ["a", "b"]}
    assert optimal_token_baseline(**alone)[0].abs().sum() == 0
    raw, returns = optimal_token_baseline(**alone, singleton="raw")
    assert torch.equal(raw, returns) and raw[0].tolist() == [1, 1, 1]


def test_the_multi_turn_form_counts_generated_tokens():
    """An observation after the first token of row 0 and before the second of row 1 moves nothing."""
    spots = torch.tensor([[0, 2, 3], [0, 1, 4]])
    put = lambda x, junk: torch.full((2, 5), junk).scatter(1, spots, x.float())
    mask = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]])
    batch = {k: put(x, torch.nan) if torch.is_tensor(x) else x for k, x in OTB.items()}
    advantages, returns = tir_optimal_token_baseline(**{**batch, "response_mask": mask}, handle_zero_tail=False)
    assert advantages[mask.bool()].tolist() == pytest.approx([0.444444, 0.514286, 0, -0.355556, -0.285714], abs=1e-5)
    assert (advantages[mask == 0] == 0).all() and (returns[mask == 0] == 0).all()
    with_tail, _ = tir_optimal_token_baseline(**{**batch, "response_mask": mask})
    assert with_tail[0, 3].item() == pytest.approx(1)


def test_vapo_has_two_lambdas():
    rewards, values = torch.tensor([[0, 0, 0, 1.0]]), torch.full((1, 4), 0.5)
    config = SimpleNamespace(vapo_length_alpha=1.0, vapo_lam_critic=1.0)
    advantages, returns = vapo(rewards, values, torch.ones(1, 4), config=config)
    assert returns.tolist() == [[1, 1, 1, 1]]
    raw = torch.tensor([0.210938, 0.28125, 0.375, 0.5])
    torch.testing.assert_close(advantages[0], (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=0)
    config.vapo_length_alpha = None
    fixed, _ = vapo(rewards, values, torch.ones(1, 4), lam=0.75, config=config)
    torch.testing.assert_close(fixed, advantages)


def test_the_length_adaptive_lambda_is_never_negative():
    lengths = torch.tensor([0.0, 10, 20, 40, 100, 1000])
    assert length_adaptive_lam(lengths, 0.05).tolist() == pytest.approx([0, 0, 0, 0.5, 0.8, 0.98])


PRIME = {
    "process_rewards": 0.05 * torch.tensor([[1, -2, 0.5], [0.4, 0.2, torch.nan]]),
    "acc": torch.tensor([1.0, 0.0]),
    "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    "index": ["a", "a"],
}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("paper", [[0.93, 0.895, 1.01], [-0.953333, -0.981667, 0]]),
        ("compat", [[0.93, 0.836667, 1.043333], [-0.953333, -0.986667, 0]]),
    ],
)
def test_prime_centres_process_and_outcome_apart(form, expected):
    advantages, returns = prime(**PRIME, process_coef=1.0, outcome_coef=1.0, form=form)
    torch.testing.assert_close(returns, torch.tensor(expected), atol=1e-5, rtol=0)
    valid = returns[PRIME["response_mask"].bool()]
    whitened = (valid - valid.mean()) / valid.std()
    torch.testing.assert_close(advantages[PRIME["response_mask"].bool()], whitened, atol=1e-5, rtol=0)
    assert advantages[1, 2] == 0


def test_prime_weighs_both_rewards_by_five_and_whitens_them():
    advantages, returns = prime(**PRIME, form="compat")
    expected = [[4.65, 4.183333, 5.216667], [-4.766667, -4.933333, 0]]
    torch.testing.assert_close(returns, torch.tensor(expected), atol=1e-5, rtol=0)
    expected = [[0.722096, 0.632949, 0.830347], [-1.076777, -1.108615, 0]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-5, rtol=0)


def test_prime_options():
    outcome_only = {"process_coef": 0.0, "outcome_coef": 1.0}
    _, returns = prime(**PRIME, **outcome_only)
    assert returns.tolist() == [[1, 1, 1], [-1, -1, 0]]
    _, whole = prime(**PRIME, process_coef=1.0, outcome_coef=0.0, granularity="whole")
    # Sums -.025 and .03 on the last tokens; means over tokens -.025 / 3 and .015.
    assert whole[0].tolist() == pytest.approx([-0.025 - 3 * 0.015, -0.025 - 2 * 0.015, -0.025 - 0.015], abs=1e-6)
    _, returns = prime(**PRIME, process_coef=1.0, outcome_coef=0.0, zero_last=True)
    assert returns[1].tolist() == pytest.approx([0.02 + 2 * 0.05 / 3, 0.05 / 3, 0], abs=1e-6)
    _, scaled = prime(**PRIME, process_coef=1.0, outcome_coef=0.0, batch_norm=True)
    _, plain = prime(**PRIME, process_coef=1.0, outcome_coef=0.0)
    torch.testing.assert_close(scaled, plain / (0.075 + 1e-6))  # the largest |p_s + ...| is |-.1 + .025|
    alone = {**PRIME, "index": ["a", "b"]}
    assert prime(**alone)[1].abs().sum() == 0
    _, raw = prime(**alone, process_coef=1.0, outcome_coef=1.0, singleton="raw")
    assert raw[0].tolist() == pytest.approx([0.975, 0.925, 1.025])


def test_dr_grpo_is_a_configuration():
    """Mean only, and a loss over a constant length: two rows of 3 and 1 tokens count by their tokens, not evenly."""
    rewards, mask = torch.tensor([[0, 0, 1.0], [0, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages, _ = grpo(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=False)
    assert advantages.tolist() == [[0.5] * 3, [-0.5, 0, 0]]
    loss = agg_loss(-advantages, mask, "seq-mean-token-sum-norm")
    assert loss.item() == pytest.approx((-1.5 + 0.5) / (3 * 2))
