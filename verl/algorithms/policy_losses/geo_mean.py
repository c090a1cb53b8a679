"""Geometric-mean policy optimization (GMPO, https://arxiv.org/abs/2507.20673). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.clip import Clip
from verl.config.schema.actor import ActorConfig

EPSILON = 1e-10


@policy_loss(forced_agg_mode="seq-mean-token-sum", own_weights=True)
def geo_mean(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The geometric mean of a row's ratios, each clipped beforehand, weighs the row's mean advantage.

    With d the log-ratio, A the advantage; low and high bound log-ratios here (the paper's 0.4)::

        k = min(d, high) where A > 0, max(d, -low) where A < 0, 0 where A = 0
        x = -(mean of A over the row) exp(mean of k over the row)      one per row; the loss is the mean of the rows

    Importance weights multiply a row by their geometric mean. Returned is x, spread over the row's tokens, (b, T).
    """
    clip, d, sign = Clip.of(config), tokens.log_ratio, tokens.advantages.sign()
    clipped = d.clamp(-clip.low, clip.high)
    k = torch.minimum(sign * d, sign * clipped) * sign
    row = -tokens.row_mean(tokens.advantages) * tokens.row_mean(k).exp()
    if tokens.weights is not None:
        row = row * tokens.row_mean((tokens.weights + EPSILON).log() * tokens.mask).exp()
    outside = clipped != d
    shares = {"pg_clipfrac": outside & (sign > 0), "pg_clipfrac_lower": outside & (sign < 0)}
    return (row / tokens.lengths).expand(d.shape), shares
