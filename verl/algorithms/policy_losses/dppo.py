"""Divergence proximal policy optimization (arXiv 2602.04879): the trust region is a distance of distributions.

Both forms estimate it from the sampled token. With p and q the current and the old probability of it, r = p / q,
c = clip_ratio_c, low and high from clip_ratio_low and clip_ratio_high, and S the signed distance from q to p, a token
stops where it has moved too far in the direction of its advantage::

    M = 0 where A > 0 and S > high, or A < 0 and S < -low, else 1
    x = -A min(r, c) M log_prob          min(r, c) and M are constants
    dx / dlog_prob = -A min(r, c) M
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.blocks import log_
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Terms, exp, policy_loss

EPSILON = 1e-8
ONE = torch.ones(())


@policy_loss()
def dppo_tv(block: Block, config: Any) -> Terms:
    """Total variation: S = p - q."""
    ratio = block.ratio()
    new, old = _probabilities(block, ratio)
    return _terms(block, Clip.of(config), ratio, new.sub_(old))


@policy_loss()
def dppo_kl(block: Block, config: Any) -> Terms:
    """Binary KL: S = D with the sign of p - q, D = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))."""
    ratio = block.ratio()
    new, old = _probabilities(block, ratio)
    rest = torch.add(ONE, old, alpha=-1.0, out=block.spare())
    others = torch.add(rest, EPSILON, out=block.spare()).div_(new.neg_().add_(1.0 + EPSILON))
    others = log_(others).mul_(rest)
    divergence = others.addcmul_(old, block.log_ratio, value=-1.0)
    return _terms(block, Clip.of(config), ratio, torch.copysign(divergence, block.log_ratio, out=rest))


def _probabilities(block: Block, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """p and q; where a log-ratio was bounded, p / r is not q."""
    new, old = exp(block.uncleaned[0], block.spare()), block.spare()
    return new, exp(block.old_log_prob, old) if block.bounded else torch.div(new, ratio, out=old)


def _terms(block: Block, clip: Clip, ratio: Tensor, moved: Tensor) -> Terms:
    beyond = torch.clamp(moved, -clip.low, clip.high, out=block.log_ratio)
    beyond = moved.sub_(beyond).mul_(block.advantages)  # positive where it went with the advantage
    stops = torch.gt(beyond, 0.0, out=beyond)
    num_stopped = stops.sum()
    slope = ratio.clamp_(max=clip.c).mul_(block.advantages)
    return Terms(None, slope.mul_(stops.sub_(1.0)), {"pg_clipfrac": num_stopped})
