import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.algorithms import poison, ragged_mask
from verl.algorithms.aggregation import (
    LOSS_AGG_MODES,
    LossNorm,
    agg_loss,
    check_agg_mode,
    loss_metric,
    loss_norm,
    normalised_by,
    running_norm,
    token_means,
)
from verl.errors import ConfigError
from verl.metrics import Metric, MetricSet

MATRIX = torch.tensor([[-1, -1.28, -0.5], [0.8, 3, 0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
WHOLE = {
    "token-mean": 0.204,
    "token-sum": 1.02,
    "seq-mean-token-sum": 0.51,
    "seq-mean-token-mean": 0.486667,
    "seq-mean-token-sum-norm": 0.17,
}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_worked_numbers_of_every_mode(mode):
    assert agg_loss(poison(MATRIX, MASK), MASK, mode).item() == pytest.approx(WHOLE[mode], abs=1e-6)


def test_upstreams_form_of_the_last_mode_does_not_divide_by_sequences():
    compat = agg_loss(MATRIX, MASK, "seq-mean-token-sum-norm", compat_sum_norm=True)
    assert compat.item() == pytest.approx(0.34)


@pytest.mark.parametrize(
    ("mode", "locals_", "mean"),
    [
        ("token-mean", [-1.112, 1.52], 0.204),
        ("seq-mean-token-mean", [-0.926667, 1.9], 0.486667),
        ("seq-mean-token-sum", [-2.78, 3.8], 0.51),
    ],
)
def test_worked_numbers_on_two_ranks(mode, locals_, mean):
    norm = loss_norm(MASK, dp_size=2)
    shares = [agg_loss(MATRIX[i : i + 1], MASK[i : i + 1], mode, norm).item() for i in (0, 1)]
    assert shares == pytest.approx(locals_, abs=1e-6)
    assert sum(shares) / 2 == pytest.approx(mean, abs=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(LOSS_AGG_MODES),
    st.sampled_from([1, 2, 4]),
    st.lists(st.integers(0, 3), min_size=4, max_size=24),
)
def test_no_cut_into_ranks_and_micro_batches_changes_loss_gradient_or_metric(seed, mode, dp_size, sizes):
    """``sizes``: rows of successive micro-batches (0: an empty one), split over the ranks in turn."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = sum(sizes), 5
    mask = ragged_mask(generator, rows, width)
    loss_mat = poison(torch.randn(rows, width, generator=generator, dtype=torch.float64), mask).requires_grad_()
    whole = agg_loss(loss_mat, mask, mode, loss_norm(mask, loss_scale_factor=7))
    (gradient,) = torch.autograd.grad(whole, loss_mat)
    shares = [[] for _ in range(dp_size)]
    start = 0
    for number, size in enumerate(sizes):
        shares[number % dp_size].append(slice(start, start + size))
        start += size
    counts = [sum(torch.tensor([mask[s].sum(), mask[s].any(-1).sum()]).double() for s in share) for share in shares]
    norm = loss_norm(mask, dp_size, loss_scale_factor=7, all_reduce=lambda _: sum(counts))
    metrics, total = MetricSet(), 0.0
    for share in shares:
        for piece in share:
            loss = agg_loss(loss_mat[piece], mask[piece], mode, norm)
            metrics.merge({"loss": loss_metric(loss.item(), mask[piece], mode, norm)})
            total = total + loss / dp_size
    (cut_gradient,) = torch.autograd.grad(total, loss_mat)
    torch.testing.assert_close(total, whole, atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(cut_gradient, gradient, atol=1e-9, rtol=1e-6)
    assert metrics.values()["loss"] == pytest.approx(whole.item(), abs=1e-6)


def test_an_empty_mini_batch_gives_zero_with_a_graph():
    loss_mat = torch.randn(2, 3, requires_grad=True)
    for mode in LOSS_AGG_MODES:
        loss = agg_loss(loss_mat, torch.zeros(2, 3), mode)
        loss.backward()
        assert loss.item() == 0 and (loss_mat.grad == 0).all()


def test_empty_rows_are_not_sequences():
    norm = loss_norm(torch.tensor([[1, 1], [0, 0], [0, 1]]))
    assert (norm.num_tokens, norm.num_sequences, norm.loss_scale_factor) == (3, 2, 2)
    assert loss_norm(torch.ones(1, 2), loss_scale_factor=512).loss_scale_factor == 512


def test_an_unknown_mode_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"actor\.loss_agg_mode.*'token_mean'.*Did you mean 'token-mean'"):
        check_agg_mode("token_mean", key="actor.loss_agg_mode")


def test_inside_an_optimizer_step_a_loss_without_a_norm_is_normalised_by_it():
    norm = LossNorm(num_tokens=10, num_sequences=4, dp_size=2)
    assert running_norm() is None
    with normalised_by(norm) as running:
        assert not running.used
        assert agg_loss(MATRIX, MASK, "token-mean").item() == pytest.approx(1.02 / 10 * 2)
        assert running.used
    assert running_norm() is None


def test_token_means_weigh_by_tokens():
    found = token_means({"share": MATRIX > 0, "value": poison(MATRIX, MASK)}, MASK)
    assert found["share"] == Metric(pytest.approx(0.4), "mean", 5)
    assert found["value"].value == pytest.approx(0.204)
    assert token_means({"share": MATRIX > 0}, torch.zeros_like(MASK))["share"] == Metric(0.0, "mean", 0)
