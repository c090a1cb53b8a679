"""The worked example of every policy loss: its value, gradient and metrics by hand on two rows."""

import pytest
import torch

from tests.harness.algorithms import actor_config, loss_batch, policy_loss_config
from verl.algorithms.policy_losses.base import Tokens
from verl.algorithms.policy_losses.bypass import bypass_mode
from verl.algorithms.policy_losses.cispo import cispo
from verl.algorithms.policy_losses.clip_cov import clip_cov
from verl.algorithms.policy_losses.covariance import covariance
from verl.algorithms.policy_losses.dppo_kl import dppo_kl
from verl.algorithms.policy_losses.dppo_tv import dppo_tv
from verl.algorithms.policy_losses.dro import dro
from verl.algorithms.policy_losses.geo_mean import geo_mean
from verl.algorithms.policy_losses.gpg import gpg_loss
from verl.algorithms.policy_losses.gspo import gspo
from verl.algorithms.policy_losses.kl_cov import kl_cov
from verl.algorithms.policy_losses.reinforce import reinforce
from verl.algorithms.policy_losses.sapo import sapo
from verl.errors import ConfigError

WEIGHTS = torch.tensor([[1, 0.5, 2], [1, 1, torch.nan]])


def run(loss_fn, weights=None, mode=None, changes=None, **settings):
    """Value, gradient and metrics on the fixture; ``changes`` are of the actor, ``settings`` of policy_loss."""
    batch = loss_batch()
    config = actor_config(policy_loss=policy_loss_config(**settings), **(changes or {}))
    loss, metrics = loss_fn(**batch, loss_agg_mode=mode, config=config, rollout_is_weights=weights)
    loss.backward()
    return loss.item(), batch["log_prob"].grad, {name: metric.value for name, metric in metrics.items()}


def check(found, value, gradient):
    assert found[0] == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(found[1], torch.tensor(gradient, dtype=torch.float64), atol=1e-6, rtol=0)


def test_gspo():
    found = run(gspo)
    check(found, 0.481134, [[-0.151427] * 3, [0.467707, 0.467707, 0]])
    check(run(gspo, changes={"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}), 0.481134, found[1].tolist())
    check(run(gspo, mode="token-mean"), 0.481134, found[1].tolist())  # its own aggregation, whatever is configured


def test_gspo_stops_a_sequence_that_moved_too_far_with_its_advantage():
    batch = loss_batch()
    batch["log_prob"] = (batch["old_log_prob"] + torch.tensor([[0.5], [-0.5]])).requires_grad_()
    loss, metrics = gspo(**batch, config=actor_config())
    loss.backward()
    assert loss.item() == pytest.approx((-1.28 + 0.8) / 2)
    assert (batch["log_prob"].grad == 0).all() and metrics["pg_clipfrac"].value == 1


def test_sapo():
    check(run(sapo), 0.340115, [[-0.166667, -0.235004, -0.078335], [0.170730, 0.072779, 0]])


def test_sapo_has_the_slope_of_the_policy_gradient_where_the_policy_has_not_moved():
    batch = loss_batch()
    batch["log_prob"] = batch["old_log_prob"].clone().requires_grad_()
    sapo(**batch, config=None)[0].backward()
    expected = [[-1 / 6] * 3, [0.25, 0.25, 0]]
    torch.testing.assert_close(batch["log_prob"].grad, torch.tensor(expected, dtype=torch.float64))


def test_gpg():
    check(run(gpg_loss), 0.108089, [[-0.2] * 3, [0.2, 0.2, 0]])


def test_clip_cov():
    found = run(clip_cov, clip_cov_lb=0.1, clip_cov_ratio=0.2)
    check(found, 0.804, [[0, 0, -0.1], [0, 1, 0]])
    assert found[2]["pg_clipfrac"] == pytest.approx(0.2)
    check(run(clip_cov), 0.604, [[-0.2, 0, -0.1], [0, 1, 0]])  # the defaults find no candidate here


@pytest.mark.parametrize("num_candidates", [4, 2048])  # no more than are wanted, and many more
def test_clip_cov_leaves_out_the_wanted_number_of_candidates(num_candidates):
    side = torch.zeros(64 * 64)  # +1 and -1 on candidates, with C = 1; 0 on the others, with C = 0
    side[:num_candidates] = torch.tensor([1.0, -1.0]).repeat(num_candidates // 2)
    side = side[torch.randperm(len(side), generator=torch.Generator().manual_seed(1))].view(64, 64)
    mask = torch.ones(64, 64)
    mask.view(-1)[side.flatten().nonzero()[0]] = 0  # a candidate outside the mask is none
    log_prob = (side - 2).requires_grad_()
    settings = policy_loss_config(clip_cov_ratio=0.0012, clip_cov_lb=0.5, clip_cov_ub=2.0)  # 4 of 4095 tokens
    loss, metrics = clip_cov(log_prob.detach(), log_prob, side, mask, config=actor_config(policy_loss=settings))
    loss.backward()
    left_out = (log_prob.grad == 0) & (side != 0) & (mask > 0)
    assert left_out.sum() == min(4, num_candidates - 1)
    assert metrics["pg_clipfrac"].value == pytest.approx(left_out.sum().item() / 4095)


def test_the_covariances():
    batch = loss_batch()
    tokens = Tokens.of(
        batch["log_prob"], batch["old_log_prob"], batch["advantages"], batch["response_mask"], weights=None
    )
    cov = covariance(tokens)[batch["response_mask"].bool()]
    assert cov.tolist() == pytest.approx([0.165587, 0.489959, -0.388931, 1.379629, -0.979706], abs=1e-6)
    assert not cov.requires_grad


def test_kl_cov():
    check(run(kl_cov, ppo_kl_coef=1.0), 0.611335, [[-0.2, -0.3, -0.1], [-0.06, 1, 0]])
    found = run(kl_cov)
    assert found[0] == pytest.approx(0.547133, abs=1e-6)
    distances = torch.tensor([1.5, 0.5, 0.7, 5.0], dtype=torch.float64).log().abs()
    assert found[2]["ppo_kl"] == pytest.approx(distances.sum().item() / 5)


def test_geo_mean():
    found = run(geo_mean, changes={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4})
    check(found, 0.481961, [[-0.151151, 0, -0.151151], [0.467707, 0.467707, 0]])
    assert (found[2]["pg_clipfrac"], found[2]["pg_clipfrac_lower"]) == pytest.approx((0.4, 0.2))
    weighted = run(geo_mean, WEIGHTS, changes={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4})
    assert weighted[0] == pytest.approx(0.481961, abs=1e-6)  # both rows have weights of geometric mean 1
    doubled = run(geo_mean, 2 * WEIGHTS, changes={"clip_ratio_low": 0.4, "clip_ratio_high": 0.4})
    assert doubled[0] == pytest.approx(2 * 0.481961, abs=1e-6)


def test_cispo():
    found = run(cispo)
    check(found, 0.146053, [[-0.2, -0.256, -0.16], [0.16, 0.256, 0]])
    assert found[2]["pg_clipfrac"] == pytest.approx(0.8)


def test_reinforce_and_the_bypass_mode():
    """The sequence ratios are 0.75 and 3.5, bounded at 2."""
    none = run(reinforce)
    check(none, 0.270223, [[-0.5] * 3, [0.5, 0.5, 0]])
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 2.0}
    found = run(bypass_mode, rollout_correction=correction)
    check(found, -1.514356, [[-0.375] * 3, [1.0, 1.0, 0]])
    assert found[2]["rollout_corr/rollout_is_max"] == pytest.approx(3.5)
    by_hand = run(reinforce, torch.tensor([[0.75] * 3, [2.0] * 3]))
    check(by_hand, -1.514356, [[-0.375] * 3, [1.0, 1.0, 0]])


def test_the_bypass_mode_with_ppos_clip_is_vanilla_and_takes_no_weights():
    correction = {"bypass_mode": True, "rollout_is": "token"}
    for weights in (None, WEIGHTS):
        found = run(bypass_mode, weights, rollout_correction=correction)
        check(found, 0.204, [[-0.2, 0, -0.1], [0, 0, 0]])
    with pytest.raises(ConfigError, match="loss_type"):
        run(bypass_mode, rollout_correction={"loss_type": "ppo"})


def test_rejection_in_the_bypass_mode_takes_tokens_out():
    """Ratios 1, 1.5, .5 and .7, 5: with bounds .6 and 2 the third and the last token go; 3 of 5 remain."""
    correction = {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_2.0"}
    check(run(bypass_mode, rollout_correction=correction), (-1 - 1.28 + 0.8) / 3, [[-1 / 3, 0, 0], [0, 0, 0]])


def test_dppo_by_total_variation():
    """p = .368, .552, .184 and .095, .677; q = .368 and .135: p - q = 0, .184, -.184 and -.041, .541.

    All may move with bounds .2 and .28, in the first row upwards, in the second (A < 0) downwards: -.041 >= -.2.
    """
    p = torch.tensor([[1.0, 1.5, 0.5], [0.7, 5, 1]], dtype=torch.float64)
    weight = p.clamp(max=3.0)
    log_p = loss_batch()["log_prob"].detach()
    x = torch.tensor([[-1.0, -1, -1], [1, 1, 0]], dtype=torch.float64) * weight * log_p
    found = run(dppo_tv)
    check(found, x.sum().item() / 5, [[-0.2, -0.3, -0.1], [0.14, 0.6, 0]])
    tight = run(dppo_tv, changes={"clip_ratio_low": 0.04, "clip_ratio_high": 0.1})
    stopped = torch.tensor([[0.0, 1, 0], [1, 0, 0]], dtype=torch.float64)
    check(tight, (x * (1 - stopped)).sum().item() / 5, [[-0.2, 0, -0.1], [0, 0.6, 0]])
    assert tight[2]["pg_clipfrac"] == pytest.approx(0.4)


def test_dppo_by_binary_kl():
    """D = q log(q/p) + (1-q) log((1-q)/(1-p)): .0682 at (0,1) with p > q and A > 0; .0086 at (1,0), both turned."""
    found = run(dppo_kl, changes={"clip_ratio_low": 0.008, "clip_ratio_high": 0.06})
    assert found[1].tolist() == [pytest.approx([-0.2, 0, -0.1]), pytest.approx([0, 0.6, 0])]
    wider = run(dppo_kl, changes={"clip_ratio_low": 0.009, "clip_ratio_high": 0.08})
    assert wider[1].tolist() == [pytest.approx([-0.2, -0.3, -0.1]), pytest.approx([0.14, 0.6, 0])]
    assert (found[2]["pg_clipfrac"], wider[2]["pg_clipfrac"]) == pytest.approx((0.4, 0))


def test_dro():
    """x = -(log_prob A - beta / 2 d^2) with d = 0, .405, -.693 and -.357, 1.609."""
    batch, beta = loss_batch(), 0.5
    d = (batch["log_prob"] - batch["old_log_prob"]).detach()
    x = -(batch["log_prob"].detach() * batch["advantages"] - beta / 2 * d**2)
    slope = (-batch["advantages"] + beta * d) * batch["response_mask"] / 5
    found = run(dro, dro_beta=beta)
    check(found, (x * batch["response_mask"]).sum().item() / 5, slope.tolist())
    assert found[0] == pytest.approx(0.108089 + 0.25 * (0.164402 + 0.480453 + 0.127217 + 2.590290) / 5, abs=1e-5)
    for beta in (None, 0.0, -1.0):
        with pytest.raises(ConfigError, match=r"policy_loss\.dro_beta.*above 0"):
            run(dro, dro_beta=beta)


def test_dppo_by_binary_kl_leaves_a_token_alone_whose_probability_rounds_to_one():
    log_prob = torch.zeros(1, 1, requires_grad=True)  # float32: 1 - p is 0
    loss, metrics = dppo_kl(torch.tensor([[-1e-6]]), log_prob, torch.ones(1, 1), torch.ones(1, 1))
    loss.backward()
    assert log_prob.grad.item() == pytest.approx(-1.0, abs=1e-5) and metrics["pg_clipfrac"].value == 0


def test_the_bound_of_the_log_ratio_does_not_stop_the_pull_back():
    log_prob = torch.tensor([[-1.0]], requires_grad=True)
    settings = policy_loss_config(dro_beta=0.5)
    loss, _ = dro(
        torch.tensor([[-101.0]]),
        log_prob,
        torch.ones(1, 1),
        torch.ones(1, 1),
        config=actor_config(policy_loss=settings),
    )
    loss.backward()  # x = -(-1 - 0.25 * 20^2), dx / dlog_prob = -(1 - 0.5 * 20)
    assert (loss.item(), log_prob.grad.item()) == (pytest.approx(101.0), pytest.approx(9.0))
