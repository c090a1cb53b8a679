"""What importance weights look like: their spread, how many are out of bounds, and how much of the batch they leave.

The names and definitions are those of the rollout importance sampling of the "When Speed Kills Stability" framework,
without a prefix. A metric over tokens counts every valid token once, one over sequences every row that has any. All
numbers of one call leave the device together. Shapes: B rows, T response tokens, N valid tokens, S filled rows.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.masked import EPSILON
from verl.algorithms.rollout_correction.ratios import LOG_BOUND, Rows
from verl.algorithms.rollout_correction.weights import Weights, outside
from verl.config.schema.algorithm import Bounds

QUANTILES = (25, 50, 75, 95, 99)


@torch.no_grad()
def weight_metrics(weights: Weights, rows: Rows, level: str, bounds: Bounds) -> dict[str, float]:
    """Metrics of the weights before bounding; the shares outside the bounds show what is clamped.

    Args:
        bounds: also clamp the weights for ``std`` and ``eff_sample_size``, so that one outlier does not hide the rest.

    Returns:
        ``rollout_is_mean``, ``_std``, ``_max``, ``_min``, ``_eff_sample_size`` (a share of the batch),
        ``_ratio_fraction_high``, ``_ratio_fraction_low`` and, over sequences, ``_seq_mean``, ``_seq_std``,
        ``_seq_max``, ``_seq_min``, ``_seq_max_deviation``, ``_seq_fraction_high``, ``_seq_fraction_low``.
    """
    tokens, per_row = weights.raw[rows.mask], rows.means(weights.raw)[rows.filled]
    clamped = tokens.clamp(bounds.lower, bounds.upper)
    centre = clamped.mean()
    metrics = {
        "mean": tokens.mean(),
        "std": (clamped - centre).square().mean().sqrt(),
        "eff_sample_size": 1 / (clamped / (centre + EPSILON)).square().mean(),
        **_extremes(weights, tokens, rows, level),
        **_shares_outside(weights, tokens, rows, level, bounds),
        "seq_mean": per_row.mean(),
        "seq_std": per_row.std() if len(per_row) > 1 else per_row.new_zeros(()),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": (per_row - 1).abs().max(),
        "seq_fraction_high": _share(per_row > bounds.upper),
        "seq_fraction_low": _share(per_row < bounds.lower),
    }
    return {f"rollout_is_{name}": value for name, value in as_floats(metrics).items()}


def quantiles(weights: Weights, rows: Rows) -> dict[str, float]:
    """``rollout_is_p25`` ... ``_p99`` over the valid tokens, linearly interpolated; any number of tokens."""
    tokens = weights.raw[rows.mask].cpu().numpy()
    values = np.percentile(tokens, QUANTILES).tolist()
    return {f"rollout_is_p{q}": value for q, value in zip(QUANTILES, values)}


@torch.no_grad()
def veto_metrics(weights: Weights, rows: Rows) -> dict[str, float]:
    """``rollout_is_veto_fraction`` of sequences and ``rollout_is_catastrophic_token_fraction``; 0 without a veto."""
    if weights.catastrophic is None:
        return {"rollout_is_veto_fraction": 0.0, "rollout_is_catastrophic_token_fraction": 0.0}
    vetoed = weights.catastrophic.any(dim=-1)[rows.filled]
    metrics = {
        "rollout_is_veto_fraction": _share(vetoed),
        "rollout_is_catastrophic_token_fraction": _share(weights.catastrophic[rows.mask]),
    }
    return as_floats(metrics)


@torch.no_grad()
def masked_metrics(weights: Weights, rows: Rows, level: str, bounds: Bounds) -> dict[str, float]:
    """``rollout_is_masked_fraction`` of tokens outside the bounds (vetoes do not count), and the same of sequences.

    A sequence counts at the token level when one of its tokens is outside, else when its own weight is.
    """
    out = outside(weights.raw, bounds) & rows.mask
    metrics = {
        "rollout_is_masked_fraction": _share(out[rows.mask]),
        "rollout_is_seq_masked_fraction": _share(out.any(dim=-1)[rows.filled]),
    }
    return as_floats(metrics)


def as_floats(scalars: dict[str, Tensor]) -> dict[str, float]:
    """All scalars in one transfer from the device."""
    values = torch.stack([value.double() for value in scalars.values()]).tolist()
    return dict(zip(scalars, values))


def _extremes(weights: Weights, tokens: Tensor, rows: Rows, level: str) -> dict[str, Tensor]:
    if level == "token":
        return {"max": tokens.max(), "min": tokens.min()}
    log_weights = weights.log_raw[rows.filled]
    return {"max": log_weights.max().clamp(max=LOG_BOUND).exp(), "min": log_weights.min().clamp(max=LOG_BOUND).exp()}


def _shares_outside(weights: Weights, tokens: Tensor, rows: Rows, level: str, bounds: Bounds) -> dict[str, Tensor]:
    if level == "sequence":  # in log space, where a product of many ratios is still itself
        log_weights = weights.log_raw[rows.filled]
        low = math.log(bounds.lower) if bounds.lower > 0 else -math.inf
        high, low_share = _share(log_weights > math.log(bounds.upper)), _share(log_weights < low)
    else:
        high, low_share = _share(tokens > bounds.upper), _share(tokens < bounds.lower)
    return {"ratio_fraction_high": high, "ratio_fraction_low": low_share}


def _share(flags: Tensor) -> Tensor:
    return flags.float().mean()
