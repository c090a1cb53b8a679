"""Masked reductions that never read positions outside the mask.

Padding may hold anything, NaN and infinity included: it is replaced by zero before the arithmetic, not multiplied by
zero after it. Half precision is computed in float32; float64 stays float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.metrics import notice

EPSILON = 1e-8


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it has that already."""
    return x if x.dtype == torch.float64 else x.float()


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` where ``mask`` is 1, else 0: neither the value nor the gradient outside the mask survives."""
    return torch.where(mask.bool(), at_least_float32(values), 0.0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum over the positions with mask 1, along ``axis`` or over everything."""
    valid = zero_outside(values, mask)
    return valid.sum() if axis is None else valid.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean over the positions with mask 1; 0 where there is none."""
    counts = mask.bool().expand_as(values)
    total = counts.sum() if axis is None else counts.sum(dim=axis)
    return masked_sum(values, mask, axis) / (total + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the positions with mask 1.

    Raises:
        ValueError: with ``unbiased`` and fewer than two valid positions there is no variance.
    """
    valid = zero_outside(values, mask)
    variance = masked_mean((valid - masked_mean(valid, mask)) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.bool().expand_as(values).sum()
    if count < 2:
        raise ValueError(f"an unbiased variance needs at least 2 valid positions, the mask has {int(count)}")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values with mean 0 and variance 1 over the valid positions; 0 outside the mask.

    Args:
        shift_mean: False adds the mean back, so that only the scale changes.

    Fewer than two valid positions have no variance: the values minus their mean are returned, and a notice is given.
    """
    valid = zero_outside(values, mask)  # first, because junk would come back through the gradient of the square
    mean = masked_mean(valid, mask)
    centred = valid - mean
    if mask.bool().expand_as(values).sum() < 2:
        notice("advantages", "a batch with fewer than 2 valid tokens was centred but not scaled")
    else:
        centred = centred * torch.rsqrt(masked_var(valid, mask) + EPSILON)
    return zero_outside(centred if shift_mean else centred + mean, mask)
