"""Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss


@policy_loss()
def cispo(block: Block, config: Any) -> Terms:
    """The clip bounds a constant weight, so that every token keeps a gradient.

    With r the ratio::

        c = clip(r, 1 - low, 1 + high)
        x = -c A log_prob                 c is constant
        dx / dlog_prob = -c A

    Settings: clip_ratio_low (the paper has no lower clip: 1 or more) and clip_ratio_high, both offsets from 1.
    """
    clip, ratio = Clip.of(config), block.into_ratio()
    weight = torch.clamp(ratio, 1 - clip.low, 1 + clip.high, out=block.spare())
    num_clipped = torch.ne(weight, ratio, out=ratio).sum()
    return Terms(None, weight.mul_(block.advantages).neg_(), {"pg_clipfrac": num_clipped})
