"""PPO's clipped surrogate (arXiv 1707.06347) with unequal clips (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss


@policy_loss()
def vanilla(block: Block, config: Any) -> Terms:
    """The clipped policy loss.

    With r the ratio of new to old probability, A the advantage, w the importance weight (1 without)::

        x = max(-A r, -A clip(r, 1 - low, 1 + high))
        x = min(x, -A c)            where A < 0
        loss = agg(w x)
        dx / dlog_prob = -A r       where neither bound holds, else 0

    Settings: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c.
    """
    clip, cost, ratio = Clip.of(config), block.advantages.neg_(), block.into_ratio()
    clipped = torch.clamp(ratio, 1 - clip.low, 1 + clip.high, out=block.spare()).mul_(cost)
    plain = ratio.mul_(cost)
    is_plain = torch.ge(plain, clipped, out=block.spare())
    loss = torch.maximum(plain, clipped, out=clipped)
    sums: dict[str, Tensor | float] = {"pg_clipfrac": plain.numel() - is_plain.sum(), "pg_clipfrac_lower": 0.0}
    if block.highest > math.log(clip.c):  # rare, so it is looked for before it is computed
        bound = cost.abs_().mul_(clip.c)  # never binds where A > 0, since the loss is negative there
        sums["pg_clipfrac_lower"] = torch.gt(loss, bound, out=block.spare()).sum()
        loss = torch.minimum(loss, bound, out=bound)
        is_plain = torch.eq(loss, plain, out=is_plain)
    return Terms(loss, plain.mul_(is_plain), sums)
