"""ReMax (Li et al., arXiv 2310.10505)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside
from verl.algorithms.recurrence import rewards_to_go
from verl.config.schema.algorithm import AlgoConfig


@torch.no_grad()
def remax(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: AlgoConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the reward of the greedy response to the same prompt; no discount, no normalisation.

    ::

        G_t = sum of r_s over valid s >= t
        A_t = G_t - b

    Args:
        token_level_rewards, response_mask: (B, T).
        reward_baselines: (B,) the score of one greedy response per prompt, by the same reward function.

    Returns:
        advantages and returns: (B, T), at least float32, 0 where the mask is 0.
    """
    returns = zero_outside(rewards_to_go(zero_outside(token_level_rewards, response_mask)), response_mask)
    return zero_outside(returns - reward_baselines[:, None].to(returns), response_mask), returns
