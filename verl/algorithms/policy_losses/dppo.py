"""Divergence proximal policy optimization (arXiv 2602.04879): the trust region is a distance of distributions.

Both forms estimate it from the sampled token. With p and q the current and the old probability of it, r = p / q,
c = clip_ratio_c, delta from clip_ratio_low and clip_ratio_high, and M = 1 where a token may still move::

    x = -A min(r, c) M log_prob          min(r, c) and M are constants
    dx / dlog_prob = -A min(r, c) M
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Terms, exp, policy_loss

EPSILON = 1e-8


@policy_loss()
def dppo_tv(block: Block, config: Any) -> Terms:
    """Total variation: M = [p - q <= high] where A > 0, else [p - q >= -low]."""
    clip, ratio, (new, old) = Clip.of(config), block.ratio(), _probabilities(block)
    moved = new.sub_(old)
    too_low = torch.lt(moved, -clip.low, out=old)
    return _terms(block, clip, ratio, moved.gt_(clip.high), too_low)


@policy_loss()
def dppo_kl(block: Block, config: Any) -> Terms:
    """Binary KL: with D = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8)),
    M = [D <= high or p <= q] where A > 0, else [D <= low or p >= q].
    """
    clip, ratio, (new, old) = Clip.of(config), block.ratio(), _probabilities(block)
    rest = 1.0 - old
    others = (rest + EPSILON).div_(1.0 + EPSILON - new).log_().mul_(rest)
    divergence = torch.addcmul(others, old, block.log_ratio, value=-1.0)
    too_high = torch.gt(divergence, clip.high, out=rest).mul_(torch.gt(new, old, out=torch.empty_like(new)))
    too_low = divergence.gt_(clip.low).mul_(new.lt_(old))
    return _terms(block, clip, ratio, too_high, too_low)


def _probabilities(block: Block) -> tuple[Tensor, Tensor]:
    return exp(block.log_prob), exp(block.log_prob - block.log_ratio)


def _terms(block: Block, clip: Clip, ratio: Tensor, too_high: Tensor, too_low: Tensor) -> Terms:
    """A token stops where it is too high and A > 0, or too low and A <= 0; both are 0 or 1."""
    rises = torch.gt(block.advantages, 0.0, out=torch.empty_like(ratio))
    keeps = 1.0 - torch.lerp(too_low, too_high, rises)
    num_stopped = block.mask.sum() - torch.linalg.vecdot(keeps, block.mask).sum()
    slope = ratio.clamp_(max=clip.c).mul_(keeps).mul_(block.advantages).neg_()
    return Terms(slope * block.log_prob, slope, {"pg_clipfrac": num_stopped})
