import pytest
import torch

from tests.harness.algorithms import poison
from verl.algorithms.aggregation import LossNorm
from verl.algorithms.value_loss import value_loss

VPREDS = torch.tensor([[1.0, 1.2, 0.1, 7.0]], dtype=torch.float64)
RETURNS, VALUES = torch.ones(1, 4, dtype=torch.float64), torch.full((1, 4), 0.4, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0]])


def test_worked_loss_and_clipped_share():
    loss, clipfrac = value_loss(VPREDS, RETURNS, VALUES, MASK, 0.5)
    assert loss.item() == pytest.approx(0.143333, abs=1e-6)
    assert clipfrac.item() == pytest.approx(1 / 3)


def test_gradient_equals_finite_differences_and_ignores_junk():
    vpreds = poison(VPREDS, MASK).requires_grad_()
    junk = [poison(x, MASK) for x in (RETURNS, VALUES)]
    loss, _ = value_loss(vpreds, *junk, MASK, 0.5)
    loss.backward()
    # max(e, e_clipped): the first token takes the clipped (constant) error, the second and third their own.
    expected = torch.tensor([[0, 0.2 / 3, -0.9 / 3, 0]], dtype=torch.float64)
    torch.testing.assert_close(vpreds.grad, expected)


def test_it_is_normalised_over_the_mini_batch():
    norm = LossNorm(num_tokens=30, num_sequences=10, dp_size=2)
    loss, _ = value_loss(VPREDS, RETURNS, VALUES, MASK, 0.5, "token-mean", norm)
    assert loss.item() == pytest.approx(0.143333 * 3 / 30 * 2, abs=1e-6)
