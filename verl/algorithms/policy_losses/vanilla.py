"""PPO's clipped surrogate (https://arxiv.org/abs/1707.06347) with unequal sides (DAPO, 2503.14476) and dual clip
(1912.09729). Shapes: b rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.clip import Clip
from verl.config.schema.actor import ActorConfig


@policy_loss()
def vanilla(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The clipped policy loss, (b, T).

    With r the ratio of new to old probability and A the advantage::

        x = max(-A r, -A clip(r, 1 - low, 1 + high))
        x = min(x, -A c)            where A < 0

    Settings: clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c.
    """
    clip, cost, ratio = Clip.of(config), -tokens.advantages, tokens.ratio
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = torch.maximum(plain, clipped)
    bound = torch.where(cost > 0, cost * clip.c, torch.inf)
    return torch.minimum(loss, bound), {"pg_clipfrac": clipped > plain, "pg_clipfrac_lower": loss > bound}
