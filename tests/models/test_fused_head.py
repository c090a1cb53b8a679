"""The fused LM head against log_softmax over whole logits, written out here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl.models.fused_head import OnePassHead, Shape, TokenStatistics
from verl.models.fused_head.listed import ListedStatistics
from verl.models.fused_head.tiled import MAX_TOKENS, Tile


def naive(hidden, weight, bias, labels, shape: Shape):
    z = hidden @ weight.t() + (0 if bias is None else bias)
    z = z * shape.scale
    if shape.softcap is not None:
        z = torch.tanh(z / shape.softcap) * shape.softcap
    log_p = (z / shape.temperature).log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, labels[:, None])[:, 0], -(p * log_p).sum(1), p.square().sum(1)


def inputs(tokens: int, vocabulary: int, with_bias: bool, seed: int = 0, hidden: int = 16, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(tokens, hidden, generator=g), torch.randn(vocabulary, hidden, generator=g)]
    if with_bias:
        tensors.append(torch.randn(vocabulary, generator=g))
    labels = torch.randint(0, vocabulary, (tokens,), generator=g)
    return [t.to(dtype).requires_grad_() for t in tensors], labels


def both(tensors, labels, shape, wanted, weights):
    """Statistics and gradients: fused, naive."""
    results = []
    for function in (lambda *x: TokenStatistics.apply(*x, wanted), naive):
        found = function(*tensors[:2], tensors[2] if len(tensors) > 2 else None, labels, shape)
        used = [0] + [i + 1 for i in range(2) if wanted[i]]
        loss = sum((found[i].double() * weights[i]).sum() for i in used)
        results.append(([found[i].detach() for i in used], torch.autograd.grad(loss, tensors)))
    return results


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 20), vocabulary=st.integers(2, 60), tile=st.integers(1, 500), bias=st.booleans(),
    wanted=st.tuples(st.booleans(), st.booleans()), temperature=st.sampled_from([1.0, 0.7]),
    family=st.sampled_from([(1.0, None), (0.5, None), (2.0, 3.0)]), seed=st.integers(0, 3),
)  # fmt: skip
def test_statistics_and_gradients_are_those_of_whole_logits(
    tokens, vocabulary, tile, bias, wanted, temperature, family, seed
):
    tensors, labels = inputs(tokens, vocabulary, bias, seed)
    weights = torch.randn(3, tokens, generator=torch.Generator().manual_seed(seed + 1)).double()
    shape = Shape(temperature, *family, tile)
    (found, gradients), (expected, expected_gradients) = both(tensors, labels, shape, wanted, weights)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients):
        assert (a - b).norm() <= 1e-5 * b.norm().clamp(min=1.0)


@pytest.mark.parametrize("tile", [1, 500])
def test_gradients_are_exact_where_one_word_has_nearly_all_probability(tile):
    """Against float64: 1 - p is small there, and p has to be known better than log-sum-exp as one float32 allows."""
    tensors, labels = inputs(1, 3, with_bias=True, seed=3)
    weights, shape = torch.randn(3, 1, generator=torch.Generator().manual_seed(4)).double(), Shape(0.7, tile=tile)
    (_, found), _ = both(tensors, labels, shape, (True, True), weights)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    loss = sum((x * y).sum() for x, y in zip(naive(*exact, labels, shape), weights))
    for a, b in zip(found, torch.autograd.grad(loss, exact)):
        assert (a.double() - b).norm() < 3e-6


def test_three_words_by_hand():
    """z = (0, ln 2, ln 5): p = (1, 2, 5)/8."""
    weight = torch.tensor([[0.0], [2.0], [5.0]]).log().nan_to_num(neginf=0.0).requires_grad_()
    hidden = torch.ones(1, 1, requires_grad=True)
    log_p, entropy, squared = TokenStatistics.apply(
        hidden, weight, None, torch.tensor([1]), Shape(tile=1), (True, True)
    )
    p = torch.tensor([1.0, 2.0, 5.0]) / 8
    assert log_p.item() == pytest.approx(-1.3862944)
    assert entropy.item() == pytest.approx(float(-(p * p.log()).sum()))
    assert squared.item() == pytest.approx(30 / 64)
    log_p.sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([-1 / 8, 1 - 2 / 8, -5 / 8])


def test_the_result_does_not_depend_on_the_size_of_a_tile():
    tensors, labels = inputs(50, 999, False)
    weights = torch.randn(3, 50).double()
    whole, *others = [both(tensors, labels, Shape(tile=n), (True, True), weights)[0] for n in (10**9, 64, 1000, 4097)]
    for found, gradients in others:
        for a, b in zip((*found, *gradients), (*whole[0], *whole[1])):
            assert (a - b).norm() / b.norm() < 1e-5


def test_no_tile_is_larger_than_asked_and_none_is_missing():
    tiles = list(Shape(tile=300).tiles(10_000, 50, torch.device("cpu")))
    cells = torch.zeros(10_000, 50, dtype=torch.int8)
    for tokens, words in tiles:
        cells[tokens, words] += 1
        assert (tokens.stop - tokens.start) * (words.stop - words.start) <= max(300, 1)
    assert (cells == 1).all()


def test_the_memory_is_one_tile(monkeypatch):
    seen = []
    original = Tile.scratch

    def scratch(self, number, rows, columns):
        found = original(self, number, rows, columns)
        seen.append(sum(m.numel() for m in self._memory))
        return found

    monkeypatch.setattr(Tile, "scratch", scratch)
    tensors, labels = inputs(64, 5000, False)
    sum(x.sum() for x in TokenStatistics.apply(*tensors, None, labels, Shape(tile=4096), (True, False))).backward()
    assert max(seen) <= 2 * 4096  # of 64 x 5000 logits


def test_more_tokens_than_a_block_add_up(monkeypatch):
    monkeypatch.setattr("verl.models.fused_head.tiled.MAX_TOKENS", 7)
    tensors, labels = inputs(30, 40, True)
    weights = torch.randn(3, 30).double()
    (found, gradients), (expected, expected_gradients) = both(tensors, labels, Shape(tile=70), (True, True), weights)
    for a, b in zip((*found, *gradients), (*expected, *expected_gradients)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert MAX_TOKENS > 7


def test_bf16_rounds_logits_as_the_head_would():
    tensors, labels = inputs(12, 40, False, dtype=torch.bfloat16)
    found = TokenStatistics.apply(*tensors, None, labels, Shape(tile=100), (True, False))
    z = (tensors[0] @ tensors[1].t()).float()
    torch.testing.assert_close(found[0], z.log_softmax(-1).gather(1, labels[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), tensors)
    assert all(g.dtype == torch.bfloat16 and torch.isfinite(g).all() for g in gradients)


def test_a_frozen_weight_costs_no_gradient():
    (hidden, weight), labels = inputs(5, 9, False)
    weight = weight.detach()
    TokenStatistics.apply(hidden, weight, None, labels, Shape(), (False, False))[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def swept(tensors, labels, guess, slopes, shape=Shape(scale=0.5, temperature=0.7, tile=90)):
    """Log-probs and gradients of sum(slopes * log_probs): in one sweep with a guess of the slopes, and naive."""
    bias = tensors[2] if len(tensors) > 2 else None
    found = OnePassHead.apply(*tensors[:2], bias, labels, guess, shape)
    expected = naive(*tensors[:2], bias, labels, shape)[0]
    return [(x.detach(), torch.autograd.grad((x * slopes).sum(), tensors)) for x in (found, expected)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("guess", ["right", "half of it", "wrong", "zero"])
def test_one_sweep_gives_the_gradient_whatever_was_guessed(with_bias, guess):
    tensors, labels = inputs(11, 30, with_bias)
    slopes = torch.randn(11, generator=torch.Generator().manual_seed(2))
    guesses = {"right": slopes, "half of it": 0.5 * slopes, "wrong": slopes.flip(0), "zero": torch.zeros(11)}
    (found, gradients), (expected, expected_gradients) = swept(tensors, labels, guesses[guess], slopes)
    torch.testing.assert_close(found, expected)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


class Products(TorchDispatchMode):
    """Counts matrix products within the block."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "guess, frozen, expected", [("right", False, 3), ("wrong", False, 5), ("wrong", True, 2), (None, False, 4)]
)
def test_matrix_products_of_a_pass(guess, frozen, expected):
    """Naive takes three. A frozen weight needs no slopes; tiles compute the logits twice."""
    (hidden, weight), labels = inputs(6, 20, False)
    slopes = torch.arange(1.0, 7.0)
    with Products() as counter:
        if guess is None:
            found = TokenStatistics.apply(hidden, weight, None, labels, Shape(), (False, False))[0]
        else:
            right = slopes if guess == "right" else slopes.flip(0)
            found = OnePassHead.apply(hidden, weight.detach() if frozen else weight, None, labels, right, Shape())
        (found * slopes).sum().backward()
    assert counter.found == expected


def test_one_sweep_holds_the_logits_of_a_few_tokens(monkeypatch):
    seen, original = [], Tile.scratch
    monkeypatch.setattr(Tile, "scratch", lambda self, *a: seen.append(a[1] * a[2]) or original(self, *a))
    tensors, labels = inputs(64, 500, False)
    OnePassHead.apply(*tensors, None, labels, torch.ones(64), Shape(tile=1024)).sum().backward()
    assert set(seen) == {2 * 500}  # of 64 x 500


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (2.0, 3.0)])
def test_what_needs_all_logits_gets_those_of_two_tokens_at_a_time(with_bias, scale, softcap):
    def statistics(z, tokens=slice(None)):
        sizes.append(len(z))
        log_probs, ids = z.log_softmax(-1).topk(3)
        return log_probs, ids, z.square().mean(-1) * slopes[tokens]

    sizes: list[int] = []
    tensors, _ = inputs(7, 50, with_bias, dtype=torch.float64)
    slopes = torch.arange(7.0)
    z = (tensors[0] @ tensors[1].t() + (tensors[2] if with_bias else 0)) * scale
    expected = statistics((z if softcap is None else torch.tanh(z / softcap) * softcap) / 0.7)
    arguments = [t.detach().float().requires_grad_() for t in tensors]
    bias = arguments[2] if with_bias else None
    computed = ListedStatistics.apply(*arguments[:2], bias, Shape(0.7, scale, softcap, tile=2 * 50), statistics)
    assert sizes == [7, 2, 2, 2, 1] and torch.equal(computed[1], expected[1])
    for mine, theirs in zip(computed, expected):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), atol=1e-5, rtol=1e-5)
    losses = [(values[0] * torch.tensor([1.0, -2.0, 3.0])).sum() + values[2].sum() for values in (computed, expected)]
    for mine, theirs in zip(torch.autograd.grad(losses[0], arguments), torch.autograd.grad(losses[1], tensors)):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
