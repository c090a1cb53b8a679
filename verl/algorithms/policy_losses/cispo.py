"""Clipped importance sampling policy optimization (MiniMax-M1, https://arxiv.org/abs/2506.13585).

Shapes: b rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.clip import Clip
from verl.config.schema.actor import ActorConfig


@policy_loss()
def cispo(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The clip bounds a constant weight, so that every token keeps a gradient; (b, T).

    With r the ratio and A the advantage::

        x = -clip(r, 1 - low, 1 + high) A log_prob          the clipped ratio is constant

    Settings: clip_ratio_low (the paper has no lower clip: 1 or more) and clip_ratio_high, both offsets from 1.
    """
    clip, ratio = Clip.of(config), tokens.ratio.detach()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -weight * tokens.advantages * tokens.log_prob, {"pg_clipfrac": weight != ratio}
