"""REINFORCE++ (Hu, arXiv 2501.03262)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside
from verl.algorithms.recurrence import discounted_sum
from verl.algorithms.whitening import whitened
from verl.config.schema.algorithm import AlgoConfig
from verl.metrics import as_float


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: AlgoConfig | None = None,
    gamma: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Discounted returns, whitened over all valid tokens of the batch; no critic and no group.

    Over the valid tokens only, so that a turn before an observation is credited for what comes after it::

        G_t = r_t + gamma * G_next
        advantages = (G - mean) / std

    Args:
        token_level_rewards, response_mask: (B, T); a KL penalty usually is in the rewards.
        gamma: None takes ``config.gamma``, or 1 without a configuration.

    Returns:
        advantages and returns: (B, T), at least float32, 0 where the mask is 0.
    """
    if gamma is None:
        gamma = 1.0 if config is None else config.gamma
    returns = zero_outside(discounted_sum(token_level_rewards, response_mask, as_float(gamma)), response_mask)
    return whitened(returns, response_mask), returns
