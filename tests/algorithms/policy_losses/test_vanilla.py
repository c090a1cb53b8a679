import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import actor_config, loss_batch, poison, ragged_mask
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.vanilla import vanilla
from verl.errors import ConfigError

MODES = {
    "token-mean": 0.204,
    "seq-mean-token-sum": 0.51,
    "seq-mean-token-mean": 0.486667,
    "seq-mean-token-sum-norm": 0.17,
}


@pytest.mark.parametrize("mode", MODES)
def test_worked_loss(mode):
    loss, _ = vanilla(**loss_batch(), loss_agg_mode=mode, config=actor_config())
    assert loss.item() == pytest.approx(MODES[mode], abs=1e-6)


def test_worked_gradient_and_metrics():
    batch = loss_batch()
    loss, metrics = vanilla(**batch, config=actor_config())
    loss.backward()
    expected = torch.tensor([[-0.2, 0, -0.1], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(batch["log_prob"].grad, expected, atol=1e-8, rtol=0)
    values = {name: metric.value for name, metric in metrics.items()}
    assert values == pytest.approx({"pg_clipfrac": 0.4, "pg_clipfrac_lower": 0.2, "ppo_kl": -0.193016}, abs=1e-6)
    assert {metric.weight for metric in metrics.values()} == {5}


def test_importance_weights_scale_each_token():
    weights = torch.tensor([[1, 0.5, 2], [1, 1, torch.nan]], requires_grad=True)
    loss, _ = vanilla(**loss_batch(), config=actor_config(), rollout_is_weights=weights)
    assert loss.item() == pytest.approx(0.232, abs=1e-6)
    loss.backward()
    assert weights.grad is None  # they are data


def test_on_policy_the_gradient_is_that_of_reinforce():
    batch = loss_batch()
    batch["log_prob"] = batch["old_log_prob"].clone().requires_grad_()
    loss, metrics = vanilla(**batch, config=actor_config())
    loss.backward()
    expected = -batch["advantages"] * batch["response_mask"] / 5
    torch.testing.assert_close(batch["log_prob"].grad, expected)
    assert metrics["pg_clipfrac"].value == metrics["ppo_kl"].value == 0


def test_null_sides_take_the_symmetric_clip_and_the_dual_clip_must_exceed_one():
    assert Clip.of(actor_config(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None)) == Clip(0.3, 0.3, 3.0)
    assert Clip.of(actor_config(clip_ratio=0.3)) == Clip(0.2, 0.28, 3.0)
    assert Clip.of(None) == Clip(0.2, 0.2, 3.0)
    with pytest.raises(ConfigError, match=r"actor\.clip_ratio_c.*greater than 1"):
        Clip.of(actor_config(clip_ratio_c=1.0))


def test_huge_ratios_and_minus_infinity_stay_finite():
    batch = loss_batch()
    batch["old_log_prob"] = torch.full((2, 3), -2000.0)
    loss, metrics = vanilla(**batch, config=actor_config())
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(batch["log_prob"].grad).all()
    assert metrics["ppo_kl"].value == pytest.approx(-20)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
def test_gradient_equals_finite_differences_and_ignores_junk(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    old, advantages, noise = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(3))
    bends = torch.tensor([0.8, 1.28, 3.0], dtype=torch.float64).log()
    assume((0.5 * noise[..., None] - bends).abs().min() > 1e-5)  # there the two sides have two slopes
    new = poison(old + 0.5 * noise, mask).requires_grad_()

    def loss_at(log_prob):
        return vanilla(poison(old, mask), log_prob, poison(advantages, mask), mask, config=actor_config())[0]

    (gradient,) = torch.autograd.grad(loss_at(new), new)
    step = 1e-6
    for row, column in mask.nonzero().tolist():
        change = torch.zeros_like(new)
        change[row, column] = step
        slope = (loss_at(new.detach() + change) - loss_at(new.detach() - change)).item() / (2 * step)
        assert gradient[row, column].item() == pytest.approx(slope, abs=1e-5)
    assert (gradient[mask == 0] == 0).all()
