"""What holds for every policy loss: it equals its float64 oracle, and no cut, order, padding or junk shows in it."""

import copy
import hashlib

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.algorithms.policy_losses import oracles
from tests.harness.algorithms import actor_config, poison, policy_loss_config, ragged_mask
from verl.algorithms.aggregation import LOSS_AGG_MODES, loss_norm
from verl.algorithms.calls import function_place
from verl.algorithms.policy_losses import call_policy_loss
from verl.metrics import MetricSet
from verl.registry import POLICY_LOSSES

NAMES = sorted(POLICY_LOSSES.builtin_targets())
MICRO_BATCH_STATISTICS = ("clip_cov", "kl_cov")  # documented: these two look at their micro-batch
# Their formulas hold a weight, a mask or a covariance constant, so the oracle's autograd is the reference.
HOLD_CONSTANTS = ("cispo", "dppo_tv", "dppo_kl", "gspo", "clip_cov")
CONFIG = actor_config(
    policy_loss=policy_loss_config(
        dro_beta=0.7, clip_cov_lb=0.1, clip_cov_ratio=1.0, kl_cov_ratio=0.1,
        rollout_correction={"bypass_mode": True, "rollout_is": None},
    )
)  # fmt: skip
seeds = st.integers(0, 10_000)


def batch_of(seed, rows, width, dtype=torch.float64, spread=0.5):
    """Log-probs of a policy that moved, advantages of both signs, weights; NaN outside a ragged mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width)
    mask[0, 0] = 1
    noise = lambda: torch.randn(rows, width, generator=generator, dtype=torch.float64)
    old = -noise().abs() - 0.05
    new = old + spread * noise()
    new = torch.where(new < 0, new, old)
    tensors = {"old_log_prob": old, "log_prob": new, "advantages": noise(), "rollout_is_weights": noise().exp()}
    batch = {name: poison(x.to(dtype), mask) for name, x in tensors.items()}
    batch["log_prob"].requires_grad_()
    return {**batch, "response_mask": mask}


def evaluate(name, batch, mode="token-mean", norm=None):
    norm = norm or loss_norm(batch["response_mask"])
    inputs = {"rollout_is_weights": None, **batch}
    return call_policy_loss(POLICY_LOSSES.get(name), **inputs, loss_agg_mode=mode, config=CONFIG, norm=norm)


def unweighted(batch):
    return {name: x for name, x in batch.items() if name != "rollout_is_weights"}


def at_a_tie(name, batch):
    """Two tokens have the same covariance, so that kl_cov chooses by their order, or by a rounding error."""
    return name == "kl_cov" and int(batch["response_mask"].sum()) == 2


@pytest.mark.parametrize("name", [n for n in NAMES if n != "rollout_correction"])
@settings(max_examples=12, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 6), st.sampled_from(LOSS_AGG_MODES), st.booleans())
def test_value_and_gradient_equal_the_float64_oracle(name, seed, rows, width, mode, weighted):
    batch = batch_of(seed, rows, width)
    assume(not at_a_tie(name, batch))
    weighted = weighted and name != "bypass_mode"  # it takes none
    loss, _ = evaluate(name, batch if weighted else unweighted(batch), mode)
    expected = oracles.total(name, mode, batch, batch["rollout_is_weights"] if weighted else None)
    (theirs,) = torch.autograd.grad(expected, batch["log_prob"])
    (ours,) = torch.autograd.grad(loss, batch["log_prob"])
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-8)
    torch.testing.assert_close(ours, torch.nan_to_num(theirs), atol=1e-8, rtol=1e-7)
    assert (ours[batch["response_mask"] == 0] == 0).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n not in HOLD_CONSTANTS and n != "rollout_correction"])
def test_the_gradient_equals_finite_differences(name):
    batch = unweighted(batch_of(7, 3, 4))
    (gradient,) = torch.autograd.grad(evaluate(name, batch)[0], batch["log_prob"])
    step = 1e-6
    for row, column in batch["response_mask"].nonzero().tolist():
        values = []
        for sign in (1, -1):
            moved = batch["log_prob"].detach().clone()
            moved[row, column] += sign * step
            values.append(evaluate(name, {**batch, "log_prob": moved})[0].item())
        assert gradient[row, column].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_within_1e_5_of_float64(name):
    wide, narrow = unweighted(batch_of(3, 8, 16)), unweighted(batch_of(3, 8, 16, torch.float32))
    found = [evaluate(name, batch) for batch in (wide, narrow)]
    assert found[1][0].dtype == torch.float32 and found[1][0].item() == pytest.approx(found[0][0].item(), rel=1e-5)
    gradients = [torch.autograd.grad(loss, batch["log_prob"])[0] for (loss, _), batch in zip(found, (wide, narrow))]
    torch.testing.assert_close(gradients[1].double(), gradients[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(seeds, st.integers(1, 7), st.integers(0, 3))
def test_neither_row_order_nor_padding_shows(name, seed, rows, padding):
    batch = batch_of(seed, rows, 5)
    assume(not at_a_tie(name, batch))
    loss, metrics = evaluate(name, batch)
    (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    moved = {
        key: torch.nn.functional.pad(x.detach()[order], (0, padding), value=0 if key == "response_mask" else torch.nan)
        for key, x in batch.items()
    }
    moved["log_prob"].requires_grad_()
    other, other_metrics = evaluate(name, moved, norm=loss_norm(batch["response_mask"]))
    (other_gradient,) = torch.autograd.grad(other, moved["log_prob"])
    torch.testing.assert_close(other, loss, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(other_gradient[:, :5], gradient[order], atol=1e-10, rtol=1e-8)
    values = lambda found: {key: metric.value for key, metric in found.items()}
    assert values(other_metrics) == pytest.approx(values(metrics), abs=1e-7)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in MICRO_BATCH_STATISTICS])
@settings(max_examples=8, deadline=None)
@given(seeds, st.integers(1, 7), st.integers(1, 4), st.sampled_from(LOSS_AGG_MODES), st.sampled_from([1, 2, 4]))
def test_neither_micro_batches_nor_ranks_show(name, seed, rows, size, mode, ranks):
    batch = batch_of(seed, rows, 4)
    whole, whole_metrics = evaluate(name, batch, mode)
    (expected,) = torch.autograd.grad(whole, batch["log_prob"])
    norm, total, metrics = loss_norm(batch["response_mask"], ranks), 0.0, MetricSet()
    for start in range(0, rows, size):
        loss, found = evaluate(name, {k: x[start : start + size] for k, x in batch.items()}, mode, norm)
        total = total + loss / ranks  # each rank sums its micro-batches; the backend averages over ranks
        metrics.merge({k: m for k, m in found.items() if not k.startswith("rollout_corr/")})
    torch.testing.assert_close(total, whole, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(torch.autograd.grad(total, batch["log_prob"])[0], expected, atol=1e-9, rtol=1e-7)
    for key, value in metrics.values().items():
        assert value == pytest.approx(whole_metrics[key].value, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_moves_empty_rows_and_an_empty_batch_stay_finite(name):
    batch = batch_of(5, 4, 3)
    batch["response_mask"][1] = 0
    batch["old_log_prob"] = batch["old_log_prob"] - 1000.0
    for part in (batch, {key: x * 0 if key == "response_mask" else x for key, x in batch.items()}):
        loss, metrics = evaluate(name, part)
        (gradient,) = torch.autograd.grad(loss, part["log_prob"])
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
        assert (gradient[part["response_mask"] == 0] == 0).all()
        own = [metric.value for key, metric in metrics.items() if not key.startswith("rollout_corr/")]
        assert torch.isfinite(torch.tensor(own)).all()  # perplexities 1000 nats apart are infinite
    empty = {key: x.detach()[:0].requires_grad_(key == "log_prob") for key, x in batch.items()}
    loss, _ = evaluate(name, empty, norm=loss_norm(batch["response_mask"]))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_inside_the_mask_is_not_hidden(name):
    batch = unweighted(batch_of(5, 4, 3))
    batch["log_prob"].data[0, 0] = torch.nan
    assert evaluate(name, batch)[0].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_stays_itself_in_copies_and_is_called_by_its_name(name):
    loss = POLICY_LOSSES.get(name)
    assert copy.deepcopy(loss) is loss
    module = POLICY_LOSSES.builtin_targets()[name].replace(":", ".")
    assert function_place(loss) == module and loss.__doc__


def test_a_wrong_shape_is_an_error_that_says_both_shapes():
    batch = {**batch_of(5, 4, 3), "advantages": torch.zeros(4, 1)}
    with pytest.raises(ValueError, match=r"one shape.*log_prob \(4, 3\), advantages \(4, 1\)"):
        evaluate("gspo", batch)


def test_every_loss_gives_its_own_digest_on_one_batch():
    """Equal by definition: reinforce is gpg (their default aggregations differ), and without weights and rejection the
    bypass mode is vanilla on the sampler's log-probs.
    """
    batch = unweighted(batch_of(11, 16, 8))
    digests = {}
    for name in NAMES:
        loss, _ = evaluate(name, batch)
        (gradient,) = torch.autograd.grad(loss, batch["log_prob"])
        content = torch.cat([loss.detach()[None], gradient.flatten()]).numpy().round(10) + 0.0
        digests.setdefault(hashlib.sha256(content.tobytes()).hexdigest(), set()).add(name)
    shared = [names for names in digests.values() if len(names) > 1]
    assert sorted(map(sorted, shared)) == [["bypass_mode", "rollout_correction", "vanilla"], ["gpg", "reinforce"]]
