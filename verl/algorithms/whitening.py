"""Mean 0 and variance 1 over the valid tokens of a batch.

Rows are added up in float64, so neither their order nor a large common offset shows. Shapes: B rows, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import EPSILON, zero_outside
from verl.metrics import notice


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """``(values - mean) / std`` over the valid tokens, (B, T), at least float32, 0 outside the mask."""
    values, count = zero_outside(values, mask), mask.bool().sum()
    mean = values.sum(dim=-1).double().sum() / count.clamp(min=1)
    centred = zero_outside(values - mean.to(values), mask)
    squares = centred.square().sum(dim=-1).double().sum()
    return centred * scale_of(squares, count).to(values)


def whitened_rows(per_row: Tensor, lengths: Tensor) -> Tensor:
    """(B,) numbers that stand on ``lengths`` tokens each -> (B,), whitened over those tokens."""
    per_row, lengths = per_row.double(), lengths.double()
    count = lengths.sum()
    centred = per_row - (per_row * lengths).sum() / count.clamp(min=1)
    return centred * scale_of((centred**2 * lengths).sum(), count)


def scale_of(squares: Tensor, count: Tensor) -> Tensor:
    """One over the sample standard deviation (n - 1); fewer than two numbers have none and are only centred.

    Args:
        squares: the sum of the squared distances from the mean.
        count: of how many numbers.
    """
    if count < 2:
        notice("advantages", "a batch with fewer than 2 valid tokens was centred but not scaled")
        return torch.ones_like(squares)
    return torch.rsqrt(squares / (count - 1) + EPSILON)
