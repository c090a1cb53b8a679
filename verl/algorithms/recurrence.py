"""Sums that run backwards over the valid tokens of each row, as if the masked ones were not there.

Shapes: B rows, T positions. Both functions treat all rows and all positions at once: the recurrence is a composition of
affine maps, which is associative, so log2(T) doublings compute it (Hillis and Steele, 1986).
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
        (B, T); at a masked position the sum of the next valid one. Padding on the right changes no bit of the rest.
    """
    total = zero_outside(values, mask)
    factor = torch.ones_like(total).masked_fill(mask.bool(), discount)
    shift, width = 1, values.shape[-1]
    while shift < width:  # now total_t covers the positions t .. t + shift - 1
        head = total[:, :-shift] + factor[:, :-shift] * total[:, shift:]
        total = torch.cat([head, total[:, -shift:]], dim=1)
        factor = torch.cat([factor[:, :-shift] * factor[:, shift:], factor[:, -shift:]], dim=1)
        shift *= 2
    return total


def next_valid(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T): the value at the next valid position after t, 0 where there is none."""
    width = values.shape[-1]
    positions = torch.arange(width, device=values.device).expand_as(values)
    own = torch.where(mask.bool(), positions, width)
    nearest = own.flip(-1).cummin(dim=-1).values.flip(-1)  # the first valid position at or after t
    following = torch.nn.functional.pad(nearest[:, 1:], (0, 1), value=width)
    padded = torch.nn.functional.pad(zero_outside(values, mask), (0, 1))
    return padded.gather(-1, following)
