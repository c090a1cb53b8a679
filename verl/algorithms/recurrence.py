"""Sums that run backwards over the valid tokens of each row, as if the masked ones were not there.

Shapes: B rows, T positions. All rows and positions are treated at once: the recurrence is a composition of affine maps,
which is associative, so log2(T) doublings compute it (Hillis and Steele, 1986), a block of rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.blocks import cleaned, float_mask, row_blocks
from verl.algorithms.masked import at_least_float32


def discounted_sum(values: Tensor, mask: Tensor, discount: float) -> Tensor:
    """``S_t = values_t + discount * S_next`` at valid positions, next = the next valid one; carried over masked ones.

    Args:
        values, mask: (B, T).

    Returns:
        (B, T); at a masked position the sum of the next valid one. Padding on the right changes no bit of the rest.
    """
    sums = torch.empty_like(at_least_float32(values))
    for rows in row_blocks(values):
        valid = float_mask(mask[rows], sums.dtype)
        sums[rows] = suffix_sum(cleaned(values[rows].to(sums.dtype), valid), valid, discount)
    return sums


def next_valid(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T): the value at the next valid position after t, 0 where there is none."""
    found = torch.empty_like(at_least_float32(values))
    for rows in row_blocks(values):
        valid = float_mask(mask[rows], found.dtype)
        found[rows] = following(cleaned(values[rows].to(found.dtype), valid), valid)
    return found


def suffix_sum(values: Tensor, valid: Tensor, discount: float | Tensor) -> Tensor:
    """`discounted_sum` of one block, in a tensor of its own.

    Args:
        values: (b, T), 0 outside the mask.
        valid: (b, T) 0 or 1, of the same dtype.
        discount: one for all, or (b, 1) one per row.
    """
    if isinstance(discount, Tensor) or values.shape[-1] < 2 or _has_holes(valid):
        return _compose(values, valid * (discount - 1.0) + 1.0)
    total, shift, width = values, 1, values.shape[-1]
    spare: Tensor | None = None
    while shift < width:  # now total_t covers the positions t .. t + shift - 1
        into = torch.empty_like(values) if spare is None else spare
        torch.add(total[:, :-shift], total[:, shift:], alpha=discount**shift, out=into[:, :-shift])
        into[:, -shift:] = total[:, -shift:]
        spare = None if total is values else total
        total = into
        shift *= 2
    return total


def rewards_to_go(values: Tensor) -> Tensor:
    """(b, T) that is 0 outside the mask -> (b, T): the sum from each position on, in a tensor of its own."""
    return suffix_sum(values, torch.ones_like(values[:, :1]).expand_as(values), 1.0)


def following(values: Tensor, valid: Tensor) -> Tensor:
    """`next_valid` of one block, with the arguments of `suffix_sum`."""
    own = _compose(values, 1.0 - valid) if _has_holes(valid) else values  # the first valid value at or after t
    return torch.nn.functional.pad(own[:, 1:], (0, 1))


def _has_holes(valid: Tensor) -> bool:
    """Whether a valid position follows a masked one in any row."""
    later, earlier = valid[:, 1:], valid[:, :-1]
    return bool(torch.gt(later, earlier, out=torch.empty_like(later)).sum() > 0)


def _compose(total: Tensor, factor: Tensor) -> Tensor:
    """``S_t = total_t + factor_t * S_{t+1}``."""
    shift, width = 1, total.shape[-1]
    if width < 2:
        return total.clone()
    while shift < width:
        head = torch.addcmul(total[:, :-shift], factor[:, :-shift], total[:, shift:])
        total = torch.cat([head, total[:, -shift:]], dim=1)
        factor = torch.cat([factor[:, :-shift] * factor[:, shift:], factor[:, -shift:]], dim=1)
        shift *= 2
    return total
