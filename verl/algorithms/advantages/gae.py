"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438; PPO, arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import masked_whiten, zero_outside
from verl.algorithms.recurrence import discounted_sum, next_valid


@torch.no_grad()
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float = 1.0, lam: float = 1.0, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages from a critic.

    With V' the value at the next valid token (0 after the last one, truncated or not), over the valid tokens only::

        delta_t = r_t + gamma * V'_t - V_t
        A_t     = delta_t + gamma * lam * A'_t
        returns = A + V                              (the critic's target, from the raw advantages)
        advantages = (A - mean) / std                (over all valid tokens of the batch)

    A masked token between two turns is transparent: the value and the sum are carried over it, and no gamma is charged.

    Args:
        token_level_rewards, values, response_mask: (B, T).

    Returns:
        advantages and returns, (B, T), at least float32, 0 where the mask is 0.
    """
    rewards, values = zero_outside(token_level_rewards, response_mask), zero_outside(values, response_mask)
    deltas = rewards + gamma * next_valid(values, response_mask) - values
    raw = discounted_sum(deltas, response_mask, gamma * lam)
    return masked_whiten(raw, response_mask), zero_outside(raw + values, response_mask)
