"""PPO's clipped surrogate (arXiv 1707.06347) with unequal clips (DAPO, 2503.14476) and dual clip (1912.09729)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, agg_loss, token_means
from verl.algorithms.masked import zero_outside
from verl.errors import ConfigError
from verl.metrics import Metric

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Clip:
    """The trust region of the ratio: [1 - low, 1 + high], and the dual-clip constant c > 1."""

    low: float = 0.2
    high: float = 0.2
    c: float = 3.0

    def __post_init__(self) -> None:
        if not self.c > 1.0:
            raise ConfigError(
                "the dual clip bounds the loss of a negative advantage at c times it, so c must be greater than 1",
                key="actor_rollout_ref.actor.clip_ratio_c",
                got=self.c,
            )

    @classmethod
    def of(cls, config: Any) -> Clip:
        """From an actor's configuration; a null ``clip_ratio_low`` or ``clip_ratio_high`` means ``clip_ratio``."""
        if config is None:
            return cls()
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        return cls(float(low), float(high), float(config.clip_ratio_c))


def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    norm: LossNorm | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """The clipped policy loss.

    With r = exp(log_prob - old_log_prob), A the advantage, w the importance weight (1 without)::

        x = max(-A r, -A clip(r, 1 - low, 1 + high))
        x = min(x, -A c)            where A < 0
        loss = agg(w x)

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: (b, T); gradient flows into ``log_prob``.
        config: the actor's section (clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c); None takes defaults.
        norm: see `agg_loss`.

    Returns:
        The loss, and the means over valid tokens ``pg_clipfrac``, ``pg_clipfrac_lower`` and ``ppo_kl``.
    """
    clip = Clip.of(config)
    old, new, advantages = (zero_outside(x, response_mask) for x in (old_log_prob, log_prob, advantages))
    log_ratio = (new - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip.c
    negative = advantages < 0
    loss_mat = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    if rollout_is_weights is not None:
        loss_mat = loss_mat * zero_outside(rollout_is_weights.detach(), response_mask)
    loss = agg_loss(loss_mat, response_mask, loss_agg_mode, norm)
    shares = {
        "pg_clipfrac": clipped > plain,
        "pg_clipfrac_lower": (pessimistic > bound) & negative,
        "ppo_kl": -log_ratio,
    }
    return loss, token_means(shares, response_mask)
