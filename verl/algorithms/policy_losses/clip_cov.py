"""Clip-Cov: entropy control by covariance (https://arxiv.org/abs/2505.22617). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.covariance import covariance, mask_at, num_picked
from verl.config.schema.actor import ActorConfig


@policy_loss()
def clip_cov(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's clip (no dual clip), with a random share of the tokens of high covariance taken out; (b, T).

    With r the ratio, A the advantage, C the covariance::

        x = max(-A r, -A clip(r, 1 - low, 1 + high)),     0 for the chosen tokens

    Chosen is a share of all tokens, at random without replacement among those with lb < C < ub that the clip leaves
    alone; ``pg_clipfrac`` is how many of all tokens they are. Torch's generator draws them, whose state a checkpoint
    holds. Settings: policy_loss.clip_cov_ratio (the share), clip_cov_lb, clip_cov_ub, clip_ratio_low, clip_ratio_high.
    """
    settings, clip = config and config.policy_loss, Clip.of(config)
    share, lb, ub = (
        (settings.clip_cov_ratio, settings.clip_cov_lb, settings.clip_cov_ub) if settings else (2e-4, 1.0, 5.0)
    )
    cost, ratio, cov = -tokens.advantages, tokens.ratio, covariance(tokens)
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - clip.low, 1 + clip.high)
    candidates = (tokens.mask & (cov > lb) & (cov < ub) & (clipped <= plain)).flatten().nonzero()[:, 0]
    drawn = torch.randperm(len(candidates))[: num_picked(share, tokens)]
    left_out = mask_at(candidates[drawn.to(candidates.device)], tokens)
    return torch.maximum(plain, clipped).masked_fill(left_out, 0.0), {"pg_clipfrac": left_out}
