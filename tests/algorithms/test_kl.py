import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import poison
from verl.algorithms import kl as kl_module
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    full_kl,
    full_kl_in_chunks,
    get_kl_controller,
    kl_penalty,
)
from verl.errors import ConfigError
from verl.metrics import notices


def value_and_gradient(kind, a, b):
    logprob = torch.tensor([[a]], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(logprob, torch.tensor([[b]], dtype=torch.float64), kind)
    value.sum().backward()
    return value.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("kind", "a", "b", "value", "gradient"),
    [
        ("kl", -1, -1.5, 0.5, 1),
        ("k1", -1.5, -1, -0.5, 1),
        ("abs", -1.5, -1, 0.5, -1),
        ("mse", -1, -1.5, 0.125, 0.5),
        ("k2", -1, -1.5, 0.125, 0.5),
        ("low_var_kl", -1, -1.5, 0.106531, 0.393469),
        ("k3", -1.5, -1, 0.148721, 1 - math.exp(0.5)),
        ("kl+", -1, -1.5, 0.5, 0.5),
        ("k1+", -1, -1.5, 0.5, 0.5),
        ("abs+", -1.5, -1, 0.5, -0.5),
        ("k2+", -1, -1.5, 0.125, 0.5),
        ("k3+", -1, -1.5, 0.106531, 0.5),
        ("low_var_kl+", -1, -1.5, 0.106531, 0.5),
    ],
)
def test_worked_values_and_gradients(kind, a, b, value, gradient):
    assert value_and_gradient(kind, a, b) == pytest.approx((value, gradient), abs=1e-6)


def test_extreme_ratios_are_bounded():
    assert value_and_gradient("k3", -100, 0)[0] == 10
    assert value_and_gradient("k3", 0, -1000)[0] == 10  # e^-20 + 20 - 1, cut at 10


def test_expectations_over_an_enumerated_vocabulary():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    expected = {"k1": 0.025267, "k2": 0.024862, "k3": 0.025267}
    for kind, value in expected.items():
        assert (p * kl_penalty(p.log(), q.log(), kind)).sum().item() == pytest.approx(value, abs=1e-6)
    assert full_kl(p.log() + 3, q.log() - 1).item() == pytest.approx(0.025267, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_the_expected_gradient_of_k2_and_of_full_is_that_of_the_kl(seed):
    """Over an enumerated vocabulary: d/dz sum_v p_v log(p_v / q_v) equals E_p of the gradient of k2."""
    generator = torch.Generator().manual_seed(seed)
    z, ref = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    (exact,) = torch.autograd.grad(full_kl(z, ref), z)
    log_p = torch.log_softmax(z, -1)
    sampled = kl_penalty(log_p, torch.log_softmax(ref, -1), "k2")
    (expected,) = torch.autograd.grad((log_p.detach().exp() * sampled).sum(), z)
    torch.testing.assert_close(exact, expected)


def test_full_takes_logits_and_is_refused_by_name_without_them():
    logits, ref = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5)
    found = kl_penalty(logits, ref, "full")
    log_p, log_q = logits.log_softmax(-1), ref.log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, expected)
    for kind in ("full", "full+"):
        with pytest.raises(ConfigError, match="needs the logits"):
            kl_penalty(torch.zeros(2, 3), torch.zeros(2, 3), kind)


def test_full_in_chunks_is_full_with_its_value_and_its_gradient(monkeypatch):
    monkeypatch.setattr(kl_module, "CHUNK_NUMBERS", 10)  # two rows of five at a time
    z, ref = (torch.randn(7, 5, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    whole, parts = full_kl(z, ref), full_kl_in_chunks(z, ref)
    torch.testing.assert_close(parts, whole)
    weights = torch.arange(7.0, dtype=torch.float64)
    theirs, ours = (torch.autograd.grad((found * weights).sum(), z)[0] for found in (whole, parts))
    torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(lambda x: full_kl_in_chunks(x, ref), z)
    assert full_kl_in_chunks(z[:0], ref[:0]).shape == (0,)


def test_the_gradient_of_full_by_hand():
    """p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 ln 3/2 + 1/4 ln 1/2; d/dz_v = p_v (log(p_v / q_v) - KL)."""
    z = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log().requires_grad_()
    found = full_kl_in_chunks(z, torch.zeros(1, 2, dtype=torch.float64))
    assert found.item() == pytest.approx(0.130812, abs=1e-6)
    found.sum().backward()
    assert z.grad.tolist()[0] == pytest.approx([0.205990, -0.205990], abs=1e-6)


def test_full_ignores_tokens_that_cannot_be_sampled():
    z = torch.tensor([0.0, 1.0, -torch.inf], requires_grad=True)
    found = full_kl(z, torch.tensor([1.0, 0.0, -torch.inf]))
    found.backward()
    assert torch.isfinite(found) and torch.isfinite(z.grad).all()


def test_an_unknown_estimator_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'low_var_kl'"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "low_var_k")


SCORES = torch.tensor([[0, 0, 1.0], [0, 0.5, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
OLD = torch.full((2, 3), -1.0)
REF = torch.tensor([[-1.2, -0.9, -1.5], [-1.0, -2.0, -1.0]])


def test_worked_penalty_in_the_reward():
    controller = FixedKLController(0.1)
    rewards, metrics = apply_kl_penalty(SCORES, poison(OLD, MASK), poison(REF, MASK), MASK, controller)
    torch.testing.assert_close(rewards, torch.tensor([[-0.02, 0.01, 0.95], [0, 0.4, 0]]))
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.35, "actor/reward_kl_penalty_coeff": 0.1})


def test_the_reward_is_charged_the_exact_kl_where_it_is_at_hand():
    exact = poison(torch.tensor([[0.5, 0, 1.0], [2.0, 1.0, 0]]), MASK)
    rewards, metrics = apply_kl_penalty(SCORES, None, None, MASK, FixedKLController(0.1), "full", exact)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0, 0.9], [-0.2, 0.4, 0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx((0.5 + 1.5) / 2)


def test_empty_rows_do_not_count_in_the_current_kl():
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.int64)])
    grow = lambda x: torch.cat([x, torch.full((1, 3), torch.nan)])
    controller = FixedKLController(0.1)
    _, metrics = apply_kl_penalty(grow(SCORES), grow(OLD), grow(REF), mask, controller)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.35)
    _, metrics = apply_kl_penalty(SCORES, OLD, REF, torch.zeros(2, 3), controller)
    assert metrics["actor/reward_kl_penalty"] == 0


@pytest.mark.parametrize(("current", "beta"), [(0.15, 0.00102048), (0.05, 0.00097952), (0.11, 0.00101024)])
def test_worked_adaptive_coefficient(current, beta):
    controller = AdaptiveKLController(0.001, target_kl=0.1, horizon=10000)
    controller.update(current_kl=current, n_steps=1024)
    assert controller.value == pytest.approx(beta, rel=1e-9)


def test_the_batch_is_charged_the_coefficient_before_the_update_and_its_rows_are_the_steps():
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=100)
    _, metrics = apply_kl_penalty(SCORES, OLD, REF, MASK, controller)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))


def test_the_adaptive_coefficient_survives_a_checkpoint_and_a_nan():
    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=100)
    controller.update(0.3, 10)
    value = controller.value
    controller.update(math.nan, 10)
    assert controller.value == value and "not finite" in notices()["algorithm.kl_ctrl"]
    resumed = AdaptiveKLController(0.5, target_kl=0.1, horizon=100)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == value


def test_controllers_come_from_the_configuration():
    section = SimpleNamespace(type="fixed", kl_coef=0.002, horizon=10000, target_kl=0.1)
    fixed = get_kl_controller(section)
    fixed.update(5.0, 100)
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.002
    section.type = "adaptive"
    assert isinstance(get_kl_controller(section), AdaptiveKLController)
    section.horizon = 0
    with pytest.raises(ConfigError, match=r"kl_ctrl\.horizon"):
        get_kl_controller(section)
    section.type = "adaptiv"
    with pytest.raises(ConfigError, match="Did you mean 'adaptive'"):
        get_kl_controller(section)
