"""The names and call forms that users' code has from upstream."""

from dataclasses import replace

import pytest
import torch

from tests.harness.algorithms import actor_config, loss_batch, outcome_batch, policy_loss_config
from verl.algorithms.aggregation import loss_norm, normalised_by
from verl.errors import ConfigError
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

LOSS_MAT = torch.tensor([[-1, -1.28, -0.5], [0.8, 3, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_estimators_take_positional_arguments_in_upstreams_order():
    rewards, mask, uids = outcome_batch()
    advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uids, 1e-6, False)
    assert advantages[:, 0].tolist() == pytest.approx([0.625, -0.375, 0.125, -0.375, 0, 0, 0])
    _, returns = core_algos.compute_gae_advantage_return(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    assert returns[0].tolist() == [1, 1, 1, 0]


def test_numbers_of_a_loss_leave_the_shares_of_a_sample_in_its_norm():
    shares = torch.tensor([0.6, 0.4])
    with normalised_by(loss_norm(MASK, shares=shares)) as running:
        running.norm = replace(running.norm, shares=shares)
        loss = core_algos.agg_loss(LOSS_MAT, MASK, "seq-mean-token-mean", dp_size=2)
    # one sample: 2 x (0.6 x (-2.78 / 3) + 0.4 x (3.8 / 2))
    assert loss.item() == pytest.approx(0.408, abs=1e-6)


def test_the_enum_holds_exactly_the_estimators_that_exist_and_its_members_are_their_names():
    members = {member.name: member.value for member in core_algos.AdvantageEstimator}
    assert members["GRPO"] == "grpo" and set(members.values()) == set(ADVANTAGE_ESTIMATORS.builtin_targets())
    assert core_algos.AdvantageEstimator.GRPO == "grpo" and f"{core_algos.AdvantageEstimator.GAE}" == "gae"


def test_functions_are_found_by_name_by_member_and_registered_by_decorator():
    grpo = core_algos.compute_grpo_outcome_advantage
    assert core_algos.get_adv_estimator_fn("grpo") is grpo
    assert core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator.GRPO) is grpo

    @core_algos.register_adv_est("test_core_algos_mine")
    def mine(token_level_rewards, response_mask, config=None, **kwargs): ...

    @core_algos.register_policy_loss("test_core_algos_loss")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights): ...

    assert core_algos.get_adv_estimator_fn("test_core_algos_mine") is mine
    assert core_algos.get_policy_loss_fn("test_core_algos_loss") is loss
    with pytest.raises(ValueError, match="exists already"):
        core_algos.register_adv_est("grpo")(mine)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'grpo'"):
        core_algos.get_adv_estimator_fn("grpoo")
    with pytest.raises(ConfigError, match="Did you mean 'gspo'"):
        core_algos.get_policy_loss_fn("gsop")


def test_every_policy_loss_has_its_public_form_with_metrics_as_floats():
    batch = loss_batch()
    config = actor_config(policy_loss=policy_loss_config(dro_beta=0.5))
    for name in set(POLICY_LOSSES.builtin_targets()) - {"rollout_correction", "reinforce"}:
        form = getattr(core_algos, f"compute_policy_loss_{name}")
        loss, metrics = form(**batch, config=config)
        ours, _ = POLICY_LOSSES.get(name)(**batch, config=config)
        assert loss.item() == ours.item() and form.__name__ == f"compute_policy_loss_{name}"
        assert {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"} <= set(metrics)
        assert all(isinstance(value, float) for value in metrics.values())
    batch["rollout_log_prob"] = batch.pop("old_log_prob")
    assert core_algos.compute_policy_loss_reinforce(**batch)[0].item() == pytest.approx(0.270223, abs=1e-6)


def test_the_public_optimal_token_baseline_handles_the_tail_by_default():
    ones = torch.ones(2, 2)
    mask = torch.tensor([[1, 1], [1, 0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    found, _ = core_algos.compute_optimal_token_baseline_advantage(rewards, mask, ["a", "a"], -ones, 0.5 * ones)
    assert found[0].tolist() == pytest.approx([0.5, 1.0])


def test_aggregation_takes_the_denominators_as_numbers():
    assert core_algos.agg_loss(LOSS_MAT, MASK, "token-mean").item() == pytest.approx(0.204)
    two_ranks = core_algos.agg_loss(LOSS_MAT[:1], MASK[:1], "token-mean", dp_size=2, batch_num_tokens=5)
    assert two_ranks.item() == pytest.approx(-1.112)
    rows = core_algos.agg_loss(LOSS_MAT[:1], MASK[:1], "seq-mean-token-sum", dp_size=2, global_batch_size=2)
    assert rows.item() == pytest.approx(-2.78)
    norm = core_algos.agg_loss(LOSS_MAT, MASK, "seq-mean-token-sum-norm", loss_scale_factor=10)
    assert norm.item() == pytest.approx(1.02 / 2 / 10)


def test_the_vanilla_loss_in_todays_and_in_the_older_form():
    batch = loss_batch()
    loss, metrics = core_algos.compute_policy_loss_vanilla(**batch, config=actor_config())
    assert loss.item() == pytest.approx(0.204, abs=1e-6)
    assert metrics == pytest.approx(
        {"actor/pg_clipfrac": 0.4, "actor/pg_clipfrac_lower": 0.2, "actor/ppo_kl": -0.193016}, abs=1e-6
    )
    old_form = core_algos.compute_policy_loss(**batch, cliprange=0.2, cliprange_high=0.28)
    assert [old_form[0].item(), *old_form[1:]] == pytest.approx([0.204, 0.4, -0.193016, 0.2], abs=1e-6)


def test_value_and_entropy_losses():
    ones = torch.ones(1, 3)
    loss, clipfrac = core_algos.compute_value_loss(torch.tensor([[1.0, 1.2, 0.1]]), ones, 0.4 * ones, ones, 0.5)
    assert (loss.item(), clipfrac.item()) == pytest.approx((0.143333, 1 / 3), abs=1e-6)
    halved, _ = core_algos.compute_value_loss(
        torch.tensor([[1.0, 1.2, 0.1]]), ones, 0.4 * ones, ones, 0.5, batch_num_tokens=6
    )
    assert halved.item() == pytest.approx(0.143333 / 2, abs=1e-6)
    logits = torch.tensor([[[2.0, 1, 0], [torch.nan] * 3]])
    assert core_algos.compute_entropy_loss(logits, torch.tensor([[1, 0]])).item() == pytest.approx(0.832396, abs=1e-6)


def test_kl_forms_with_and_without_the_straight_through_gradient():
    a, b = torch.tensor([[-1.0]], requires_grad=True), torch.tensor([[-1.5]])
    core_algos.kl_penalty(a, b, kl_penalty="k3+").sum().backward()
    assert a.grad.item() == pytest.approx(0.5)
    a.grad = None
    core_algos.kl_penalty_forward(a, b, "k3+").sum().backward()
    assert a.grad.item() == pytest.approx(0.393469, abs=1e-6)


def test_torch_functional_has_the_same_operators():
    assert torch_functional.masked_mean(LOSS_MAT, MASK).item() == pytest.approx(0.204)
    assert torch_functional.logprobs_from_logits(
        torch.tensor([[2.0, 1, 0]]), torch.tensor([0])
    ).item() == pytest.approx(-0.407606, abs=1e-6)
