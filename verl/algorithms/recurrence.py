"""Sums that run backwards over the valid tokens of each row, as if the masked ones were not there.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside


def discounted_sum(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """``S_t = values_t + discount * S_next`` at valid positions, next = the next valid one; carried over masked ones.

    Args:
        values, mask: (B, T).

    Returns:
        (B, T), at least float32; at a masked position the sum of the next valid one, 0 behind the last.
    """
    values, valid = zero_outside(values, mask), mask.bool()
    sums, running = torch.empty_like(values), values.new_zeros(len(values), dtype=torch.float64)
    for t in reversed(range(values.shape[1])):
        running = torch.where(valid[:, t], values[:, t] + discount * running, running)
        sums[:, t] = running
    return sums


def rewards_to_go(values: Tensor) -> Tensor:
    """(B, T) that is 0 outside the mask -> (B, T): the sum from each position on."""
    return values.flip(-1).cumsum(-1).flip(-1)
