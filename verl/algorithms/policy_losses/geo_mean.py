"""Geometric-mean policy optimization (GMPO, arXiv 2507.20673)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss

EPSILON = 1e-10


@policy_loss(forced_agg_mode="seq-mean-token-sum", own_weights=True)
def geo_mean(block: Block, config: Any) -> Terms:
    """The geometric mean of a row's ratios, each clipped beforehand, weighs the row's mean advantage.

    With d the log-ratio and n the valid tokens of a row; low and high bound log-ratios here (the paper's 0.4)::

        k = min(d, high) where A > 0, max(d, -low) where A < 0, 0 where A = 0
        R = exp(mean of k over the row),  a = mean of A over the row
        x = -a R                                      one per row; the loss is their mean over non-empty rows
        dx / dlog_prob = -a R / n                     where k = d and A is not 0, else 0

    Importance weights multiply a row by their geometric mean.
    """
    clip, ratio, sign = Clip.of(config), block.log_ratio, block.advantages.sign()
    # In the direction of the advantage there is one bound, high upwards and low downwards.
    signed, bound = ratio * sign, sign.mul((clip.high - clip.low) / 2).add_((clip.high + clip.low) / 2)
    moves = torch.le(signed, bound, out=torch.empty_like(signed)).mul_(sign.abs())
    kept = torch.minimum(signed, bound, out=bound).mul_(sign)
    row = -_row_mean(block.advantages, block) * _row_mean(kept, block).exp()
    if block.weights is not None:
        row = row * _row_mean((block.weights + EPSILON).log_().mul_(block.mask), block).exp()
    outside = torch.ne(ratio.clamp(-clip.low, clip.high), ratio, out=signed)
    both, more = torch.linalg.vecdot(outside, sign.abs()).sum(), torch.linalg.vecdot(outside, sign).sum()
    sums = {"pg_clipfrac": (both + more) / 2, "pg_clipfrac_lower": (both - more) / 2}
    return Terms(row, moves.mul_(row / block.lengths), sums)


def _row_mean(values: Tensor, block: Block) -> Tensor:
    return values.sum(dim=-1, keepdim=True) / block.lengths
