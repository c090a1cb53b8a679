"""Losses on pairs: the worked numbers, their gradients, and that no cut into micro-batches changes them."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.preference import DPOLoss, RewardModelLoss, answer_sums, bradley_terry_loss, dpo_loss
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


@pytest.mark.parametrize("loss_fn", [DPOLoss(), DPOLoss(length_normalised=True, kind="ipo"), RewardModelLoss(0.01)])
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


def test_an_unknown_loss_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"dpo.loss_type.*sigmoid"):
        DPOLoss(kind="kto")
