from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.harness.algorithms import actor_config, loss_batch, poison, policy_loss_config, ragged_mask
from verl.algorithms.aggregation import LOSS_AGG_MODES, loss_norm
from verl.algorithms.losses import PPOPolicyLoss, PPOValueLoss, SFTLoss, known_slopes
from verl.config import ActorConfig
from verl.errors import ConfigError, DataError
from verl.metrics import MetricSet


def critic_config(**changes):
    return SimpleNamespace(
        **{"loss_agg_mode": "token-mean", "loss_scale_factor": None, "cliprange_value": 0.5, **changes}
    )


def worked():
    """Fixture B as an engine hands it over: outputs with gradient, and the rest of the batch."""
    batch = loss_batch()
    outputs = {"log_probs": batch.pop("log_prob")}
    return outputs, {**batch, "old_log_probs": batch.pop("old_log_prob")}


def values(metrics):
    return {name: metric.value for name, metric in metrics.items()}


def test_the_policy_loss_alone():
    outputs, batch = worked()
    loss_fn = PPOPolicyLoss(actor_config())
    assert loss_fn.outputs == ("log_probs",)
    loss, metrics = loss_fn(outputs, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(0.204, abs=1e-6)
    assert values(metrics) == pytest.approx(
        {"pg_loss": 0.204, "pg_clipfrac": 0.4, "pg_clipfrac_lower": 0.2, "ppo_kl": -0.193016}, abs=1e-6
    )


def test_entropy_and_kl_join_with_their_coefficients():
    outputs, batch = worked()
    outputs["entropy"] = torch.tensor([[1.0, 2, 3], [4, 5, torch.nan]], requires_grad=True)
    batch["ref_log_prob"] = poison(outputs["log_probs"].detach() - 0.5, batch["response_mask"])
    config = actor_config(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k2")
    loss_fn = PPOPolicyLoss(config)
    assert loss_fn.outputs == ("log_probs", "entropy")
    loss, metrics = loss_fn(outputs, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(0.204 - 0.1 * 3.0 + 0.2 * 0.125, abs=1e-6)
    found = values(metrics)
    assert (found["entropy"], found["entropy_loss"], found["kl_loss"], found["kl_coef"]) == pytest.approx(
        (3.0, 3.0, 0.125, 0.2)
    )
    loss.backward()
    assert outputs["entropy"].grad.tolist() == [pytest.approx([-0.02] * 3), pytest.approx([-0.02, -0.02, 0])]
    assert torch.isfinite(outputs["log_probs"].grad).all()


def test_entropy_can_be_reported_without_being_trained():
    outputs, batch = worked()
    outputs["entropy"] = torch.ones(2, 3)
    loss, metrics = PPOPolicyLoss(actor_config(calculate_entropy=True))(
        outputs, batch, loss_norm(batch["response_mask"])
    )
    assert loss.item() == pytest.approx(0.204, abs=1e-6) and metrics["entropy"].value == 1


def test_the_exact_kl_is_an_output_of_the_pass_and_needs_no_log_probs_of_the_reference():
    outputs, batch = worked()
    batch.pop("ref_log_prob", None)
    outputs["full_kl"] = torch.tensor([[0.5, 0, 1.0], [2.0, 1.5, torch.nan]], requires_grad=True)
    loss_fn = PPOPolicyLoss(actor_config(use_kl_loss=True, kl_loss_type="full", kl_loss_coef=0.1))
    assert loss_fn.outputs == ("log_probs", "full_kl")
    loss, metrics = loss_fn(outputs, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(0.204 + 0.1, abs=1e-6) and metrics["kl_loss"].value == pytest.approx(1.0)
    loss.backward()
    torch.testing.assert_close(outputs["full_kl"].grad, 0.1 / 5 * batch["response_mask"].float())


def test_a_batch_without_old_log_probs_has_ratio_one():
    outputs, batch = worked()
    del batch["old_log_probs"]
    loss, metrics = PPOPolicyLoss(actor_config())(outputs, batch, loss_norm(batch["response_mask"]))
    loss.backward()
    assert loss.item() == pytest.approx(-(3 - 2) / 5)
    expected = -batch["advantages"] * batch["response_mask"] / 5
    torch.testing.assert_close(outputs["log_probs"].grad, expected)
    assert metrics["ppo_kl"].value == 0


def test_the_samplers_log_probs_are_the_old_policy_where_that_is_asked_for():
    outputs, batch = worked()
    batch["rollout_log_probs"] = batch.pop("old_log_probs")
    loss_fn = PPOPolicyLoss(actor_config(), use_rollout_log_probs=True)
    assert loss_fn(outputs, batch, loss_norm(batch["response_mask"]))[0].item() == pytest.approx(0.204, abs=1e-6)
    del batch["rollout_log_probs"]
    with pytest.raises(DataError, match="'rollout_log_probs'"):
        loss_fn(outputs, batch, loss_norm(batch["response_mask"]))


def test_importance_weights_in_the_batch_are_applied():
    outputs, batch = worked()
    batch["rollout_is_weights"] = torch.tensor([[1, 0.5, 2], [1, 1, 0]])
    loss, _ = PPOPolicyLoss(actor_config())(outputs, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(0.232, abs=1e-6)


def test_the_constant_length_comes_from_the_setting_else_from_the_configured_response_length():
    outputs, batch = worked()
    norm = loss_norm(batch["response_mask"])
    mode = "seq-mean-token-sum-norm"
    for loss_fn, length in (
        (PPOPolicyLoss(actor_config(loss_agg_mode=mode)), 3),
        (PPOPolicyLoss(actor_config(loss_agg_mode=mode), response_length=100), 100),
        (PPOPolicyLoss(actor_config(loss_agg_mode=mode, loss_scale_factor=7), response_length=100), 7),
    ):
        assert loss_fn(outputs, batch, norm)[0].item() == pytest.approx(1.02 / 2 / length, abs=1e-9)


def test_wrong_settings_are_refused_before_any_batch():
    with pytest.raises(ConfigError, match=r"actor\.loss_agg_mode"):
        PPOPolicyLoss(actor_config(loss_agg_mode="mean"))
    with pytest.raises(ConfigError, match=r"actor\.clip_ratio_c"):
        PPOPolicyLoss(actor_config(clip_ratio_c=0.5))
    with pytest.raises(ConfigError, match=r"actor\.kl_loss_type"):
        PPOPolicyLoss(actor_config(use_kl_loss=True, kl_loss_type="full+"))
    with pytest.raises(ConfigError, match=r"policy_loss\.loss_mode"):
        PPOPolicyLoss(actor_config(policy_loss=policy_loss_config(loss_mode="vanila")))
    with pytest.raises(ConfigError, match=r"critic\.loss_agg_mode"):
        PPOValueLoss(critic_config(loss_agg_mode="mean"))


def test_the_value_loss():
    outputs = {"values": torch.tensor([[1.0, 1.2, 0.1]], requires_grad=True)}
    batch = {"values": torch.full((1, 3), 0.4), "returns": torch.ones(1, 3), "response_mask": torch.ones(1, 3)}
    loss, metrics = PPOValueLoss(critic_config())(outputs, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == pytest.approx(0.143333, abs=1e-6)
    assert values(metrics) == pytest.approx(
        {"vf_loss": 0.143333, "vf_clipfrac": 1 / 3, "vpred_mean": 2.3 / 3}, abs=1e-6
    )


def test_the_supervised_loss_is_the_mean_negative_log_likelihood():
    batch = {"response_mask": torch.tensor([[1, 1, 0]])}
    loss, metrics = SFTLoss()({"log_probs": torch.tensor([[-1.0, -2, -9]])}, batch, loss_norm(batch["response_mask"]))
    assert loss.item() == 1.5 and values(metrics) == {"nll": 1.5, "num_tokens": 2}


def full_batch(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    mask[0, 0] = 1
    noise = lambda: poison(torch.randn(rows, width, generator=generator, dtype=torch.float64), mask)
    names = ("old_log_probs", "ref_log_prob", "advantages", "returns", "values")
    outputs = {name: noise().requires_grad_() for name in ("log_probs", "entropy", "values")}
    return outputs, TensorDict({**{name: noise() for name in names}, "response_mask": mask}, batch_size=[rows])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(LOSS_AGG_MODES),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([1, 2]),
)
def test_micro_batches_and_ranks_change_neither_loss_nor_gradient_nor_metrics(seed, mode, rows, size, dp_size):
    """``dp_size`` ranks take micro-batches in turn; the reference is the whole batch at once."""
    config = actor_config(
        loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="k3+", loss_scale_factor=11
    )
    for loss_fn in (PPOPolicyLoss(config), PPOValueLoss(critic_config(loss_agg_mode=mode)), SFTLoss()):
        outputs, batch = full_batch(seed, rows, 5)
        used = [outputs[name] for name in loss_fn.outputs]
        mask = batch["response_mask"]
        whole, whole_metrics = loss_fn(outputs, batch, loss_norm(mask))
        expected = torch.autograd.grad(whole, used)
        norm, total, metrics = loss_norm(mask, dp_size), 0.0, MetricSet()
        for start in range(0, rows, size):
            part = slice(start, start + size)
            loss, found = loss_fn({k: v[part] for k, v in outputs.items()}, batch[part], norm)
            total = total + loss / dp_size
            metrics.merge(found)
        torch.testing.assert_close(total, whole, atol=1e-9, rtol=1e-6)
        for ours, theirs in zip(torch.autograd.grad(total, used), expected):
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6)
            assert (ours[mask == 0] == 0).all()
        assert metrics.values() == pytest.approx(values(whole_metrics), abs=1e-5, rel=1e-5)


def test_slopes_known_beforehand_are_the_gradient_anywhere():
    rows = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = {"response_mask": rows, "advantages": torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]])}
    norm = loss_norm(rows)
    third = torch.tensor([[1, 1, 0], [1, 0, 0]]) / 3
    assert torch.allclose(known_slopes(SFTLoss(), batch, norm), -third)
    policy = PPOPolicyLoss(ActorConfig(loss_agg_mode="token-mean"))
    assert torch.allclose(known_slopes(policy, batch, norm), -third * batch["advantages"])
    anywhere = torch.randn(2, 3, requires_grad=True)
    policy({"log_probs": anywhere}, batch, norm)[0].backward()
    assert torch.allclose(anywhere.grad, -third * batch["advantages"])


@pytest.mark.parametrize("setting", [{"use_kl_loss": True}, {"entropy_coeff": 0.1}, {"calculate_entropy": True}])
def test_slopes_that_log_probs_change_are_not_known(setting):
    batch = {"response_mask": torch.ones(1, 2), "advantages": torch.ones(1, 2)}
    assert known_slopes(PPOPolicyLoss(ActorConfig(**setting)), batch, loss_norm(torch.ones(1, 2))) is None
    batch["old_log_probs"] = torch.zeros(1, 2)
    assert known_slopes(PPOPolicyLoss(ActorConfig()), batch, loss_norm(torch.ones(1, 2))) is None


def test_the_policy_gradient_equals_finite_differences():
    outputs, batch = full_batch(3, 3, 4)
    config = actor_config(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3")
    loss_fn, mask = PPOPolicyLoss(config), batch["response_mask"]
    evaluate = lambda log_probs: loss_fn({**outputs, "log_probs": log_probs}, batch, loss_norm(mask))[0]
    (gradient,) = torch.autograd.grad(evaluate(outputs["log_probs"]), outputs["log_probs"])
    for row, column in mask.nonzero().tolist():
        change = torch.zeros(3, 4, dtype=torch.float64)
        change[row, column] = 1e-6
        high, low = (evaluate(outputs["log_probs"].detach() + sign * change) for sign in (1, -1))
        assert gradient[row, column].item() == pytest.approx((high - low).item() / 2e-6, abs=1e-5)
