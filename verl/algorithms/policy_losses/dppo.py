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
from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss

EPSILON = 1e-8


@policy_loss()
def dppo_tv(block: Block, config: Any) -> Terms:
    """Total variation: M = [p - q <= high] where A > 0, else [p - q >= -low]."""
    clip, (new, old) = Clip.of(config), _probabilities(block)
    moved = new.sub_(old)
    return _terms(block, clip, _float(moved.le(clip.high), old), _float(moved.ge(-clip.low), moved))


@policy_loss()
def dppo_kl(block: Block, config: Any) -> Terms:
    """Binary KL: with D = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8)),
    M = [D <= high or p <= q] where A > 0, else [D <= low or p >= q].
    """
    clip, (new, old) = Clip.of(config), _probabilities(block)
    rest_new, rest_old = 1.0 - new, 1.0 - old
    others = (rest_old + EPSILON).div_(rest_new.add_(EPSILON)).log_().mul_(rest_old)
    divergence = torch.addcmul(others, old, block.log_ratio, value=-1.0)
    may_rise = _float((divergence <= clip.high) | (new <= old), others)
    return _terms(block, clip, may_rise, _float((divergence <= clip.low) | (new >= old), divergence))


def _probabilities(block: Block) -> tuple[Tensor, Tensor]:
    return block.log_prob.exp(), (block.log_prob - block.log_ratio).exp_()


def _float(condition: Tensor, out: Tensor) -> Tensor:
    return out.copy_(condition)


def _terms(block: Block, clip: Clip, may_rise: Tensor, may_fall: Tensor) -> Terms:
    keeps = torch.where(block.advantages > 0, may_rise, may_fall)
    slope = block.ratio().clamp_(max=clip.c).mul_(keeps).mul_(block.advantages).neg_()
    num_stopped = (1.0 - keeps).mul_(block.mask).sum()
    return Terms(slope * block.log_prob, slope, {"pg_clipfrac": num_stopped})
