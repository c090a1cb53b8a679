"""Losses on pairs: the worked numbers, their gradients, and that no cut into micro-batches changes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl.algorithms import preference
from verl.algorithms.aggregation import LossNorm
from verl.algorithms.preference import (
    KL_POINT,
    LABEL,
    REFERENCE_SUMS,
    DPOLoss,
    KTOLoss,
    RewardModelLoss,
    answer_sums,
    bradley_terry_loss,
    dpo_loss,
)
from verl.config.schema import sft as preference_settings
from verl.config.schema.sft import DPOConfig
from verl.errors import ConfigError

H = torch.tensor([1.5], dtype=torch.float64)  # log pi -10 and -12, log ref -11 and -11.5


@pytest.mark.parametrize(
    "kind, smoothing, expected", [("sigmoid", 0.0, 0.620957), ("sigmoid", 0.1, 0.635957), ("ipo", 0.0, 12.25)]
)
def test_dpo_losses_have_the_worked_numbers(kind, smoothing, expected):
    assert dpo_loss(H, 0.1, kind, smoothing).item() == pytest.approx(expected, abs=1e-6)


def test_the_hinge_is_zero_beyond_its_margin_and_linear_before():
    found = dpo_loss(torch.tensor([20.0, 10.0, 4.0, -5.0]), 0.1, "hinge")
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.6, 1.5]))


def test_the_bradley_terry_loss_has_the_worked_number_with_margin_and_centering():
    one, half = torch.tensor([1.5]), torch.tensor([0.5])
    assert bradley_terry_loss(one, half).item() == pytest.approx(0.313262, abs=1e-6)
    assert bradley_terry_loss(one, half, 1.0).item() == pytest.approx(math.log(2), abs=1e-6)
    assert bradley_terry_loss(one, half, 0.0, 0.01).item() == pytest.approx(0.313262 + 0.01 * 4.0, abs=1e-6)


def test_the_gradient_of_the_sigmoid_loss_is_that_of_the_paper():
    """dL/dh = -beta s(-beta h), Rafailov et al. 2023, section 4."""
    h = torch.linspace(-30, 30, 13, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(dpo_loss(h, 0.1).sum(), h)
    torch.testing.assert_close(found, -0.1 * torch.sigmoid(-0.1 * h.detach()))
    assert torch.autograd.gradcheck(lambda x: dpo_loss(x, 0.1, "ipo"), h)
    assert torch.autograd.gradcheck(lambda x: bradley_terry_loss(x, x * 0.5 + 1, 0.3, 0.01), h)


def pairs(seed: int = 0, rows: int = 6) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, 5, generator=generator) < 0.7).long()
    mask[:, 2] = 1
    values = torch.randn(rows, 5, generator=generator, dtype=torch.float64).masked_fill(mask == 0, float("nan"))
    batch = {"response_mask": mask, "ref_sums": torch.randn(rows, generator=generator, dtype=torch.float64)}
    batch["margin"] = torch.rand(rows // 2, generator=generator, dtype=torch.float64).repeat_interleave(2)
    return {"log_probs": values, "values": values}, batch


@pytest.mark.parametrize("loss_fn", [DPOLoss(), DPOLoss(length_normalised=True, kind="ipo"),
                                     DPOLoss(2.0, "simpo", gamma=1.0), RewardModelLoss(0.01)])  # fmt: skip
def test_micro_batches_add_up_to_the_mean_over_all_pairs(loss_fn):
    outputs, batch = pairs()
    norm = LossNorm(num_tokens=1.0, num_sequences=6)
    whole, metrics = loss_fn(outputs, batch, norm)
    parts = []
    for rows in (slice(0, 2), slice(2, 6)):
        parts.append(loss_fn({k: v[rows] for k, v in outputs.items()}, {k: v[rows] for k, v in batch.items()}, norm))
    assert sum(float(loss) for loss, _ in parts) == pytest.approx(float(whole), rel=1e-12)
    for name, metric in metrics.items():
        assert parts[0][1][name].merge(parts[1][1][name]).value == pytest.approx(metric.value, rel=1e-7), name


def test_the_loss_of_a_batch_is_the_formula_on_its_sums():
    outputs, batch = pairs(1)
    policy = answer_sums(outputs["log_probs"], batch["response_mask"])
    h = (policy - batch["ref_sums"])[0::2] - (policy - batch["ref_sums"])[1::2]
    loss, metrics = DPOLoss(0.3)(outputs, batch, LossNorm(num_tokens=1.0, num_sequences=6))
    assert float(loss) == pytest.approx(float(-torch.nn.functional.logsigmoid(0.3 * h).mean()))
    assert metrics["rewards/margins"].value == pytest.approx(float(0.3 * h.mean()))
    assert metrics["rewards/accuracies"].value == pytest.approx(float((h > 0).double().mean()))
    free, _ = DPOLoss(0.3, reference_free=True)(outputs, batch, LossNorm(num_tokens=1.0, num_sequences=6))
    assert float(free) == pytest.approx(
        float(-torch.nn.functional.logsigmoid(0.3 * (policy[0::2] - policy[1::2])).mean())
    )


def test_the_settings_and_the_losses_name_the_same_kinds():
    assert DPOConfig.__dataclass_fields__["loss_type"].metadata["choices"] == (*preference.DPO_LOSSES, "kto")
    assert preference_settings.WITHOUT_REFERENCE == preference.WITHOUT_REFERENCE


def test_an_unknown_loss_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"dpo.loss_type.*sigmoid"):
        DPOLoss(kind="kto")


def losses_of_the_policy_alone(kind: str, beta: float, gamma: float, coef: float, log_probs, mask):
    """The losses without reference and their derivatives by each token's log-prob, in NumPy, pair by pair."""
    total, gradient, count = 0.0, np.zeros(mask.shape), len(mask) // 2
    for better, worse in ((2 * pair, 2 * pair + 1) for pair in range(count)):
        size = {row: mask[row].sum() for row in (better, worse)}
        mean = {row: log_probs[row][mask[row] == 1].sum() / size[row] for row in (better, worse)}
        if kind == "simpo":
            s = 1 / (1 + np.exp(-(beta * (mean[better] - mean[worse]) - gamma)))
            loss, slopes = -np.log(s), {better: -beta * (1 - s), worse: beta * (1 - s)}
        else:
            odds = {row: np.exp(mean[row]) / (1 - np.exp(mean[row])) for row in (better, worse)}
            s = 1 / (1 + odds[worse] / odds[better])  # the sigmoid of the difference of log odds
            by_mean = {row: 1 / (1 - np.exp(mean[row])) for row in (better, worse)}
            loss = -beta * np.log(s)
            slopes = {better: -beta * (1 - s) * by_mean[better], worse: beta * (1 - s) * by_mean[worse]}
        slopes[better] -= coef
        total += (loss - coef * mean[better]) / count
        for row, slope in slopes.items():
            gradient[row] += slope / count * mask[row] / size[row]
    return total, gradient


@pytest.mark.parametrize(("kind", "coef"), [("simpo", 0.0), ("simpo", 0.3), ("orpo", None), ("orpo", 0.3)])
def test_losses_without_a_reference_are_the_formulas_written_out(kind, coef):
    for seed in range(5):
        outputs, batch = pairs(seed, rows=8)
        log_probs = (-outputs["log_probs"].abs() - 0.01).requires_grad_()
        loss_fn = DPOLoss(1.5, kind, gamma=0.4, sft_coef=coef)
        loss, metrics = loss_fn({"log_probs": log_probs}, batch, LossNorm(num_tokens=1.0, num_sequences=8))
        loss.backward()
        weight = 1.0 if coef is None else coef
        plain, mask = log_probs.detach().numpy(), batch["response_mask"].numpy()
        expected, slope = losses_of_the_policy_alone(kind, 1.5, 0.4, weight, plain, mask)
        assert loss.item() == pytest.approx(expected, rel=1e-10) and ("nll" in metrics) == bool(weight)
        np.testing.assert_allclose(log_probs.grad.numpy(), slope, rtol=1e-9, atol=1e-13)


def test_an_answer_that_is_certain_has_a_finite_loss():
    log_probs = torch.zeros(2, 3, requires_grad=True)
    batch = {"response_mask": torch.ones(2, 3, dtype=torch.long)}
    loss, _ = DPOLoss(0.1, "orpo")({"log_probs": log_probs}, batch, LossNorm(num_tokens=1.0, num_sequences=2))
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()


def test_the_likelihood_of_the_chosen_answer_is_added_to_any_loss():
    outputs, batch = pairs(3, rows=8)
    norm = LossNorm(num_tokens=1.0, num_sequences=8)
    without, _ = DPOLoss(0.3, reference_free=True)(outputs, batch, norm)
    with_it, metrics = DPOLoss(0.3, reference_free=True, sft_coef=2.0)(outputs, batch, norm)
    means = answer_sums(outputs["log_probs"], batch["response_mask"], mean=True)[0::2]
    assert with_it.item() == pytest.approx(without.item() - 2.0 * means.mean().item())
    assert metrics["nll"].value == pytest.approx(-means.mean().item())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cpo_is_equation_3_of_its_paper_with_the_answers_likelihood(smoothing):
    """Xu et al. 2024, arXiv 2401.08417, in numpy: a contrast of answer sums without reference, and their NLL."""
    for seed in range(3):
        outputs, batch = pairs(seed, rows=8)
        del batch[REFERENCE_SUMS]
        log_probs, mask = outputs["log_probs"].numpy(), batch["response_mask"].numpy()
        sums = np.where(mask == 1, log_probs, 0).sum(-1)
        h = 0.3 * (sums[0::2] - sums[1::2])
        contrast = (1 - smoothing) * np.log1p(np.exp(-h)) + smoothing * np.log1p(np.exp(h))
        nll = -sums[0::2] / mask.sum(-1)[0::2]
        loss, metrics = DPOLoss(0.3, "cpo", smoothing)(outputs, batch, LossNorm(num_tokens=1.0, num_sequences=8))
        assert loss.item() == pytest.approx((contrast + nll).mean(), rel=1e-12)
        assert metrics["nll"].value == pytest.approx(nll.mean()) and "rewards/margins" in metrics


def by_hand(kind: str, smoothing: float, normalised: bool, beta: float, outputs: dict, batch: dict):
    """The loss and its derivative by every token's log-probability, in NumPy and float64, written out pair by pair."""
    log_probs, mask = outputs["log_probs"].numpy(), batch["response_mask"].numpy()
    reference, total, gradient = batch["ref_sums"].numpy(), 0.0, np.zeros(mask.shape)
    count = len(mask) // 2
    for pair in range(count):
        better, worse = 2 * pair, 2 * pair + 1
        size = {row: mask[row].sum() if normalised else 1 for row in (better, worse)}
        ratio = {row: (log_probs[row][mask[row] == 1].sum() - reference[row]) / size[row] for row in (better, worse)}
        h = ratio[better] - ratio[worse]
        s = 1 / (1 + np.exp(-beta * h))
        if kind == "sigmoid":
            loss = -(1 - smoothing) * np.log(s) - smoothing * np.log(1 - s)
            slope = beta * (-(1 - smoothing) * (1 - s) + smoothing * s)
        elif kind == "ipo":
            loss, slope = (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        else:
            loss, slope = max(0.0, 1 - beta * h), -beta if beta * h < 1 else 0.0
        total += loss / count
        gradient[better] += slope / count * mask[better] / size[better]
        gradient[worse] -= slope / count * mask[worse] / size[worse]
    return total, gradient


@pytest.mark.parametrize("normalised", [False, True], ids=["whole answers", "per token"])
@pytest.mark.parametrize("kind, smoothing", [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)])
def test_dpo_and_its_gradient_are_the_formulas_written_out_in_float64(kind, smoothing, normalised):
    for seed in range(5):
        outputs, batch = pairs(seed, rows=8)
        log_probs = outputs["log_probs"].clone().requires_grad_()
        loss_fn = DPOLoss(0.3, kind, smoothing, normalised)
        loss, _ = loss_fn({"log_probs": log_probs}, batch, LossNorm(num_tokens=1.0, num_sequences=8))
        loss.backward()
        expected, slope = by_hand(kind, smoothing, normalised, 0.3, outputs, batch)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        np.testing.assert_allclose(log_probs.grad.numpy(), slope, rtol=1e-10, atol=1e-14)


def test_the_reward_models_loss_and_its_gradient_are_the_formulas_written_out_in_float64():
    """L = -log s(r_w - r_l - m) + c (r_w + r_l)^2, dL/dr_w = -(1 - s) + 2 c (r_w + r_l), dL/dr_l = 1 - s + the same."""
    centering = 0.05
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(8, 1, generator=generator, dtype=torch.float64)
        margin = torch.rand(4, generator=generator, dtype=torch.float64).repeat_interleave(2)
        batch = {"response_mask": torch.ones(8, 1, dtype=torch.long), "margin": margin}
        values = scores.clone().requires_grad_()
        loss, _ = RewardModelLoss(centering)({"values": values}, batch, LossNorm(num_tokens=1.0, num_sequences=8))
        loss.backward()
        r, m = scores[:, 0].numpy(), margin[0::2].numpy()
        better, worse = r[0::2], r[1::2]
        s = 1 / (1 + np.exp(-(better - worse - m)))
        assert loss.item() == pytest.approx(np.mean(-np.log(s) + centering * (better + worse) ** 2), rel=1e-12)
        pull = 2 * centering * (better + worse)
        slope = np.stack([-(1 - s) + pull, (1 - s) + pull], axis=1).reshape(8, 1) / 4
        np.testing.assert_allclose(values.grad.numpy(), slope, rtol=1e-10, atol=1e-14)


def test_kto_is_the_value_function_of_the_paper_around_its_reference_point():
    """Equation 8 of arXiv 2402.01306 in numpy: lambda - v, with v = lambda s(beta (r - z)), or s(beta (z - r))."""
    draw = np.random.default_rng(0)
    log_probs, reference = draw.normal(size=(6, 4)) - 2, draw.normal(size=6) - 8
    mask, label = draw.random((6, 4)) < 0.8, np.array([1, 0, 1, 1, 0, 0], dtype=bool)
    mask[:, 0], z, beta, weights = True, 0.7, 0.3, (1.5, 0.5)
    r = np.where(mask, log_probs, 0).sum(-1) - reference
    value = np.where(label, 1 / (1 + np.exp(-beta * (r - z))), 1 / (1 + np.exp(-beta * (z - r))))
    weight = np.where(label, *weights)
    batch = {
        "response_mask": torch.tensor(mask),
        REFERENCE_SUMS: torch.tensor(reference),
        LABEL: torch.tensor(label),
        KL_POINT: torch.full((6,), z, dtype=torch.float64),
    }
    loss_fn, norm = KTOLoss(beta, weights), LossNorm(num_tokens=1, num_sequences=6)
    loss, metrics = loss_fn({"log_probs": torch.tensor(log_probs)}, batch, norm)
    assert loss.item() == pytest.approx((weight * (1 - value)).mean(), abs=1e-9)
    assert metrics["rewards/chosen"].value == pytest.approx(beta * r[label].mean())
    assert metrics["rewards/rejected"].value == pytest.approx(beta * r[~label].mean())
    halves = [
        loss_fn(
            {"log_probs": torch.tensor(log_probs[part])}, {name: values[part] for name, values in batch.items()}, norm
        )[0].item()
        for part in (slice(0, 1), slice(1, 6))
    ]
    assert sum(halves) == pytest.approx(loss.item(), abs=1e-9), "one row has no undesirable answer"
