"""Both forms of the correction as one call each: log-probs in; weights, mask and metrics out.

`importance_sampling_of` is the form of ``algorithm.rollout_is_*``, `correction_of` that of
``algorithm.rollout_correction.*``. Metric names carry no prefix. Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.rollout_correction.mismatch import off_policy_metrics
from verl.algorithms.rollout_correction.ratios import Rows, log_ratio
from verl.algorithms.rollout_correction.rejection import rejection_mask
from verl.algorithms.rollout_correction.weight_metrics import (
    masked_metrics,
    quantiles,
    veto_metrics,
    weight_metrics,
)
from verl.algorithms.rollout_correction.weights import (
    Weights,
    batch_normalized,
    correction_weights,
    importance_weights,
    mean_shares,
    outside,
)
from verl.config.schema.algorithm import Bounds, ImportanceSampling, Rejection, rejections, weight_bounds
from verl.metrics import notice


@dataclass(frozen=True)
class Correction:
    """The newer form's settings, read and checked.

    Args:
        level: of the weights, ``token`` or ``sequence``; None makes none.
        bounds, zero_outside: cap (TIS) at the upper bound, or zero outside of both (IcePop).
        batch_normalize: scale the weights to mean 1.
        rejections: what leaves the mask.
    """

    level: str | None = None
    bounds: Bounds = field(default_factory=lambda: Bounds(0.5, 2.0))
    zero_outside: bool = False
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()

    @classmethod
    def of(cls, config: Any) -> Correction:
        """From ``algorithm.rollout_correction`` or anything with its attributes."""
        bounds, zero_outside = weight_bounds(config.rollout_is_threshold)
        rejected = () if config.rollout_rs is None else rejections(config.rollout_rs, config.rollout_rs_threshold)
        normalize = bool(config.rollout_is_batch_normalize)
        return cls(config.rollout_is, bounds, zero_outside, normalize, rejected)

    @property
    def is_on(self) -> bool:
        """Whether it changes anything; metrics of the mismatch are made either way."""
        return self.level is not None or bool(self.rejections)


@dataclass(frozen=True)
class CorrectionResult:
    """What a correction makes of a batch.

    Args:
        weights: (B, T) for the loss, 0 outside the mask; None without.
        mask: (B, T) the response mask, smaller where something was rejected.
        metrics: without a prefix.
    """

    weights: Tensor | None
    mask: Tensor
    metrics: dict[str, float]


def importance_sampling_of(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, how: ImportanceSampling
) -> CorrectionResult:
    """Weights with all metrics of the mismatch (ALGORITHMS C.1 to C.5); the mask stays.

    Without a single valid token the weights are zeros and there are no metrics, with a notice.

    Raises:
        ValueError: tensors of different shapes.
    """
    ratio = log_ratio(old_log_prob, rollout_log_prob, response_mask)
    rows = Rows.of(response_mask, ratio.dtype)
    if not rows.filled.any():
        return _nothing_valid(ratio, response_mask)
    weights = importance_weights(ratio, rows, how)
    metrics = is_metrics(weights, rows, how)
    mismatch = off_policy_metrics(old_log_prob, rollout_log_prob, response_mask)
    metrics |= {f"mismatch_{name}": value for name, value in mismatch.items()}
    return CorrectionResult(weights.bounded, response_mask, metrics)


def is_metrics(weights: Weights, rows: Rows, how: ImportanceSampling) -> dict[str, float]:
    """All ``rollout_is_*`` metrics of the older form."""
    metrics = weight_metrics(weights, rows, how.level, how.bounds) | quantiles(weights, rows)
    metrics |= veto_metrics(weights, rows)
    if how.mode == "mask":
        metrics |= masked_metrics(weights, rows, how.level, how.bounds)
    return metrics | {
        "rollout_is_threshold_upper": how.bounds.upper,
        "rollout_is_threshold_lower": how.bounds.lower,
        "rollout_is_veto_threshold": how.veto_threshold or 0.0,  # no ratio is below 0: none vetoes nothing
    }


def correction_of(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    how: Correction,
    batch_mean: float | None = None,
) -> CorrectionResult:
    """Weights, the mask after rejection, and metrics (ALGORITHMS C.6).

    Weights are made and normalised on the batch as it was sampled, before anything is rejected.

    Args:
        batch_mean: for ``batch_normalize`` where the rows are one part of a batch: the mean weight of all parts, from
            `weight_shares`. None takes the mean of these rows.

    Raises:
        ValueError: tensors of different shapes.
    """
    ratio = log_ratio(old_log_prob, rollout_log_prob, response_mask)
    rows = Rows.of(response_mask, ratio.dtype)
    if not rows.filled.any():
        return _nothing_valid(ratio if how.level else None, response_mask)
    metrics, weights, mask = off_policy_metrics(old_log_prob, rollout_log_prob, response_mask, chi2=True), None, None
    if how.level is not None:
        weights, measured = weights_of(ratio, rows, how, batch_mean)
        metrics |= measured
    if how.rejections:
        mask, measured = rejection_mask(ratio, response_mask, how.rejections)
        metrics |= measured
    return CorrectionResult(weights, response_mask if mask is None else mask, metrics)


def weight_shares(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, how: Correction) -> Tensor:
    """What one part of a batch adds to the mean of its weights: their sum and number, (2,) float64 on the CPU."""
    ratio = log_ratio(old_log_prob, rollout_log_prob, response_mask)
    rows, level = Rows.of(response_mask, ratio.dtype), how.level or "token"
    return mean_shares(correction_weights(ratio, rows, level, how.bounds, how.zero_outside).bounded, rows, level)


def weights_of(
    ratio: Tensor, rows: Rows, how: Correction, batch_mean: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The newer form's weights (B, T), detached, and their ``rollout_is_*`` metrics."""
    level = how.level or "token"
    weights = correction_weights(ratio, rows, level, how.bounds, how.zero_outside)
    metrics = weight_metrics(weights, rows, level, how.bounds)
    bounded = weights.bounded
    if how.zero_outside:
        metrics["rollout_is_oob_ratio"] = outside(weights.raw, how.bounds)[rows.mask].float().mean().item()
    if how.batch_normalize:
        bounded, metrics["rollout_is_batch_norm_factor"] = batch_normalized(bounded, rows, level, batch_mean)
    return bounded, metrics


def _nothing_valid(ratio: Tensor | None, response_mask: Tensor) -> CorrectionResult:
    notice("rollout_correction", "a batch without a single valid token has no importance weights and no metrics")
    weights = None if ratio is None else torch.zeros_like(ratio)
    return CorrectionResult(weights, response_mask, {})
