"""Divergence proximal policy optimization (https://arxiv.org/abs/2602.04879): a divergence bounds the move of a token.

Both forms estimate it from the sampled token. Shapes: b rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens
from verl.algorithms.policy_losses.clip import Clip
from verl.config.schema.actor import ActorConfig

EPSILON = 1e-8


def probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """p and q, (b, T): the constant current and old probabilities of the sampled tokens."""
    return tokens.log_prob.detach().exp(), tokens.old_log_prob.exp()


def loss_within(tokens: Tokens, config: ActorConfig | None, moved: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss of tokens that stop where they have moved too far in the direction of their advantage.

    With r the ratio, A the advantage, low and high from clip_ratio_low and clip_ratio_high, c = clip_ratio_c::

        M = 0 where A > 0 and moved > high, or A < 0 and moved < -low, else 1
        x = -A min(r, c) M log_prob          min(r, c) and M are constants

    Args:
        moved: (b, T), the signed distance from the old to the current distribution.
    """
    clip, advantages = Clip.of(config), tokens.advantages
    stops = torch.where(advantages > 0, moved > clip.high, (advantages < 0) & (moved < -clip.low))
    weight = tokens.ratio.detach().clamp(max=clip.c).masked_fill(stops, 0.0)
    return -advantages * weight * tokens.log_prob, {"pg_clipfrac": stops}
