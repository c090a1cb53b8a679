"""Rejection of what the trainer would hardly have sampled: tokens or sequences leave the mask, and so the denominators.

Unlike an importance weight of zero, which still counts in a mean over tokens, a rejected token is as if it had not been
sampled. Statistics per token of the ratio r = exp(l), trainer over sampler, l clamped to +-20::

    k1 = -l        k2 = l^2 / 2        k3 = r - 1 - l

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.rollout_correction.ratios import LOG_BOUND, Rows
from verl.algorithms.rollout_correction.weight_metrics import as_floats
from verl.config.schema.algorithm import Rejection


def divergence(log_ratio: Tensor, kind: str) -> Tensor:
    """(B, T): ``k1``, ``k2`` or ``k3`` of each token; 0 where the log-ratio is 0, so also outside the mask."""
    bounded = log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    if kind == "k1":
        return -bounded
    return bounded.square() / 2 if kind == "k2" else bounded.expm1() - bounded


def statistic(log_ratio: Tensor, rows: Rows, level: str, kind: str) -> Tensor:
    """What is compared with the bounds: (B, T) for ``token``, else one number per row, (B,)."""
    tokens = divergence(log_ratio, kind)
    if level == "token":
        return tokens
    if level == "seq_sum":
        return tokens.sum(dim=-1)
    return rows.means(tokens) if level == "seq_mean" else tokens.amax(dim=-1)


@torch.no_grad()
def rejection_mask(
    log_ratio: Tensor, response_mask: Tensor, rejections: Sequence[Rejection]
) -> tuple[Tensor, dict[str, float]]:
    """The mask without what any of the options rejects, in its own dtype, and metrics of each option and of all.

    Every option looks at the whole batch as it was sampled, so their order changes nothing.

    Args:
        log_ratio: (B, T), 0 outside the mask.
        response_mask: (B, T).
    """
    rows = Rows.of(response_mask, log_ratio.dtype)
    if not rows.filled.any():
        return response_mask, {}
    accepted, metrics = rows.mask, dict[str, float]()
    for rejection in rejections:
        values = statistic(log_ratio, rows, rejection.level, rejection.divergence)
        metrics |= rejection_metrics(rejection.option, values, rows, rejection.upper, rejection.lower)
        accepted = accepted & ~_beyond(_on_tokens(values, rows), rejection.upper, rejection.lower)
    metrics |= _shares("rollout_rs", rows, accepted)
    return torch.where(accepted, response_mask, torch.zeros_like(response_mask)), metrics


def rejection_metrics(
    option: str, values: Tensor, rows: Rows, upper: float, lower: float | None = None
) -> dict[str, float]:
    """``rollout_rs_<option>_*``: the spread of the statistic over tokens and over sequences, and what is outside.

    ``high`` and ``low`` are on the scale of the statistic: for k1 = -log r a high value is a small ratio.

    Args:
        values: (B, T) at the token level, else (B,).
    """
    is_token = values.dim() == 2
    counted = values[rows.mask] if is_token else values[rows.filled]
    per_row = (rows.means(values) if is_token else values)[rows.filled]
    least = float("-inf") if lower is None else lower
    metrics = {
        "mean": counted.mean(),
        "std": counted.std(correction=0),
        "max": counted.max(),
        "min": counted.min(),
        "fraction_high": (counted > upper).float().mean(),
        "fraction_low": (counted < least).float().mean(),
        "seq_mean": per_row.mean(),
        "seq_std": per_row.std() if len(per_row) > 1 else per_row.new_zeros(()),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": per_row.abs().max(),
        "seq_fraction_high": (per_row > upper).float().mean(),
        "seq_fraction_low": (per_row < least).float().mean(),
    }
    shares = _shares(f"rollout_rs_{option}", rows, rows.mask & ~_beyond(_on_tokens(values, rows), upper, lower))
    return {f"rollout_rs_{option}_{name}": value for name, value in as_floats(metrics).items()} | shares


def _on_tokens(values: Tensor, rows: Rows) -> Tensor:
    return values if values.dim() == 2 else rows.spread(values)


def _beyond(values: Tensor, upper: float, lower: float | None) -> Tensor:
    return values > upper if lower is None else (values > upper) | (values < lower)


def _shares(name: str, rows: Rows, kept: Tensor) -> dict[str, float]:
    """Shares of valid tokens that are dropped, and of sequences that lose one or more."""
    dropped = rows.mask & ~kept
    shares = {
        f"{name}_masked_fraction": dropped[rows.mask].float().mean(),
        f"{name}_seq_masked_fraction": dropped.any(dim=-1)[rows.filled].float().mean(),
    }
    return as_floats(shares)
