"""Importance weights between the sampler that produced a batch and the trainer that learns from it.

The sampler's policy mu differs from the trainer's pi_old, because engine, precision or age of the weights differ. A
loss weighted by w = pi_old / mu is an estimate under pi_old again; bounding w trades its variance for a bias.

References: Liu, Li et al., "When Speed Kills Stability" (2025); truncation as in Flash-RL; masking as in IcePop;
decoupled PPO (arXiv 2110.00641). Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.masked import EPSILON
from verl.algorithms.rollout_correction.ratios import Rows, bounded_exp, by_level
from verl.config.schema.algorithm import Bounds, ImportanceSampling


@dataclass(frozen=True)
class Weights:
    """Weights of a batch before and after bounding.

    Args:
        raw: (B, T) exp of the clamped log-weight, 0 outside the mask.
        log_raw: the log-weight, not clamped: (B, T) at the token level, else (B,).
        bounded: (B, T) what enters the loss; 0 outside the mask and in vetoed rows.
        catastrophic: (B, T) bool, tokens below the veto threshold; None without one.
    """

    raw: Tensor
    log_raw: Tensor
    bounded: Tensor
    catastrophic: Tensor | None = None


def raw_weights(log_ratio: Tensor, rows: Rows, level: str) -> tuple[Tensor, Tensor]:
    """Weights (B, T) before bounding, 0 outside the mask, and their logarithm by `by_level`."""
    log_raw = by_level(log_ratio, rows, level)
    if level == "token":
        return torch.where(rows.mask, bounded_exp(log_raw), 0.0), log_raw
    return rows.spread(bounded_exp(log_raw)), log_raw


def outside(raw: Tensor, bounds: Bounds) -> Tensor:
    """Bool: weights outside the closed interval."""
    return (raw < bounds.lower) | (raw > bounds.upper)


@torch.no_grad()
def importance_weights(log_ratio: Tensor, rows: Rows, how: ImportanceSampling) -> Weights:
    """Weights of one batch (ALGORITHMS C.2, C.3).

    With l_t the log-ratio of a token and T the valid tokens of its row, log w is ``l_t`` (token), ``sum l`` (sequence)
    or ``sum l / T`` (geometric). Then::

        truncate:  min(w, upper)
        mask:      w where lower <= w <= upper, else 0
        veto:      0 on a whole row in which some l_t < log(veto_threshold), at every level

    Args:
        log_ratio: (B, T), 0 outside the mask, not clamped (the veto looks at it as it is).
    """
    raw, log_raw = raw_weights(log_ratio, rows, how.level)
    if how.mode == "truncate":
        bounded = raw.clamp(max=how.bounds.upper)
    else:
        bounded = torch.where(outside(raw, how.bounds), 0.0, raw)
    catastrophic = None
    if how.veto_threshold is not None:
        catastrophic = (log_ratio < math.log(how.veto_threshold)) & rows.mask
        bounded = torch.where(catastrophic.any(dim=-1, keepdim=True), 0.0, bounded)
    return Weights(raw, log_raw, bounded, catastrophic)


@torch.no_grad()
def correction_weights(log_ratio: Tensor, rows: Rows, level: str, bounds: Bounds, zero_outside: bool) -> Weights:
    """Weights of the newer form: capped (TIS), or zero outside the bounds (IcePop); no veto.

    Args:
        level: ``token`` or ``sequence``.
        zero_outside: IcePop.
    """
    raw, log_raw = raw_weights(log_ratio, rows, level)
    if zero_outside:
        return Weights(raw, log_raw, torch.where(outside(raw, bounds), 0.0, raw))
    return Weights(raw, log_raw, raw.clamp(max=bounds.upper))


def batch_normalized(bounded: Tensor, rows: Rows, level: str, batch_mean: float | None) -> tuple[Tensor, float]:
    """Weights scaled to mean 1 over valid tokens (token) or over rows (sequence), and the mean they had.

    A mean of almost nothing (1e-8 or less) is not divided by.

    Args:
        batch_mean: the mean over the batch where these rows are only part of it; None takes it over these rows.
    """
    factor = _mean(bounded, rows, level).item() if batch_mean is None else batch_mean
    return (bounded / factor if factor > EPSILON else bounded), factor


def _mean(bounded: Tensor, rows: Rows, level: str) -> Tensor:
    if level == "token":
        return bounded.sum() / (rows.lengths.sum() + EPSILON)
    return rows.means(bounded)[rows.filled].mean() if rows.filled.any() else bounded.new_zeros(())


def mean_shares(bounded: Tensor, rows: Rows, level: str) -> Tensor:
    """(2,) float64 on the CPU: the sum of the weights and their number, of tokens (token) or of rows (sequence).

    Summed over the parts of a batch, their quotient is the batch's mean.
    """
    exact = bounded.cpu().double()
    mask, filled = rows.mask.cpu(), rows.filled.cpu()
    if level == "token":
        return torch.stack([exact.sum(), mask.sum().double()])
    per_row = exact.sum(dim=-1)[filled] / mask.sum(dim=-1)[filled]
    return torch.stack([per_row.sum(), filled.sum().double()])
