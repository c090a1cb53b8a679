"""Mean 0 and variance 1 over the valid tokens of a batch, from moments that blocks of rows or whole rows contribute.

Moments are merged pairwise in float64 (Chan, Golub and LeVeque, 1983), so neither the order of the rows nor a large
common offset shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.blocks import float_mask, row_blocks
from verl.algorithms.masked import EPSILON
from verl.metrics import notice


@dataclass
class Moments:
    """How many valid numbers there are, their mean, and the sum of their squared distances from it."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor, valid: Tensor) -> None:
        """Count in a block (b, T) whose values are 0 outside the mask; ``valid`` is 0 or 1, of the same dtype."""
        count = float(valid.sum())
        if count == 0:
            return
        mean = float(values.sum(dim=-1).double().sum()) / count
        centred = torch.add(values, valid, alpha=-mean)
        self.merge(count, mean, float(centred.square_().sum(dim=-1).double().sum()))

    def merge(self, count: float, mean: float, squares: float) -> None:
        """Count in the moments of other numbers."""
        if count == 0:
            return
        total, distance = self.count + count, mean - self.mean
        self.squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    @property
    def scale(self) -> float:
        """One over the sample standard deviation (n - 1); fewer than two numbers have none and are only centred."""
        if self.count < 2:
            notice("advantages", "a batch with fewer than 2 valid tokens was centred but not scaled")
            return 1.0
        return (self.squares / (self.count - 1) + EPSILON) ** -0.5

    def whiten(self, values: Tensor, mask: Tensor) -> Tensor:
        """``(values - mean) * scale`` in place, 0 outside the mask; ``values`` (B, T) are 0 there already."""
        scale = self.scale
        for rows in row_blocks(values):
            values[rows].add_(float_mask(mask[rows], values.dtype), alpha=-self.mean).mul_(scale)
        return values


def whitened_rows(per_row: Tensor, lengths: Tensor) -> Tensor:
    """(B,) numbers that stand on ``lengths`` tokens each -> (B,), whitened over those tokens."""
    per_row, lengths = per_row.double(), lengths.double()
    moments = Moments()
    count = float(lengths.sum())
    if count > 0:
        mean = float((per_row * lengths).sum()) / count
        moments.merge(count, mean, float(((per_row - mean) ** 2 * lengths).sum()))
    return (per_row - moments.mean) * moments.scale
