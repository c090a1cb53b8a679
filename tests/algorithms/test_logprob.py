import pytest
import torch

from verl.algorithms.logprob import (
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
)

Z = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)


def test_worked_numbers_of_three_logits():
    logprobs = logprobs_from_logits(Z.expand(3, 3), torch.arange(3))
    assert logprobs.exp().tolist() == pytest.approx([0.665241, 0.244728, 0.090031], abs=1e-6)
    assert entropy_from_logits(Z).item() == pytest.approx(0.832396, abs=1e-6)
    assert sum_pi_squared_from_logits(Z).item() == pytest.approx(0.510543, abs=1e-6)


def test_entropy_gradient_is_the_formula():
    z = Z.clone().requires_grad_()
    entropy = entropy_from_logits(z)
    entropy.backward()
    p = Z.softmax(-1)
    torch.testing.assert_close(z.grad, -p * (p.log() + entropy.detach()))


def kept_logprobs(z):
    return logprobs_from_logits(z, torch.tensor([[1, 3]]), inplace_backward=False)


@pytest.mark.parametrize("function", [kept_logprobs, entropy_from_logits])
def test_gradients_equal_finite_differences(function):
    z = torch.randn(1, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(function, (z,))


def test_an_impossible_token_contributes_nothing():
    z = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    entropy = entropy_from_logits(z)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.693147)
    assert torch.isfinite(z.grad).all()


def test_half_precision_logits_are_computed_in_float32():
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    labels = torch.tensor([0, 1, 2, 3])
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        logprobs_from_logits(logits, labels).double(), exact[range(4), labels], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        entropy_from_logits(logits).double(), -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=1e-5
    )


def test_improbable_tokens_keep_their_logprobs_and_gradients():
    """Around -87 a float32 probability loses its digits, below -104 it is 0."""
    gaps = torch.tensor([0.0, 1.0, 80.0, 87.0, 90.0, 100.0, 103.5, 110.0, 1000.0])
    logits = torch.stack([gaps, torch.zeros_like(gaps), torch.full_like(gaps, -2.0)], dim=-1).requires_grad_()
    labels = torch.ones(len(gaps), dtype=torch.long)
    wide = logits.detach().double().requires_grad_()
    found, exact = logprobs_from_logits(logits, labels), wide.log_softmax(-1)[:, 1]
    torch.testing.assert_close(found.double(), exact, atol=2e-7, rtol=2e-7)
    upstream = torch.linspace(-1, 2, len(gaps))
    found.backward(upstream)
    exact.backward(upstream.double())
    torch.testing.assert_close(logits.grad.double(), wide.grad, atol=2e-7, rtol=1e-6)


def test_a_backward_pass_in_place_gives_the_same_gradient_once():
    logits, labels = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1])
    kept, written = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs_from_logits(kept, labels, inplace_backward=False).sum().backward()
    total = logprobs_from_logits(written, labels).sum()
    total.backward(retain_graph=True)
    assert torch.equal(kept.grad, written.grad) and torch.equal(written.detach(), logits)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_nothing(chunk):
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(entropy_from_logits_with_chunking(logits, chunk), entropy_from_logits(logits))
    assert entropy_from_logits_with_chunking(logits[:, :0], chunk).shape == (2, 0)
