"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438; PPO, arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside
from verl.algorithms.whitening import whitened
from verl.metrics import as_float


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
        gamma, lam: a number in any form, a tensor without dimensions included.

    Returns:
        advantages and returns, (B, T), at least float32, 0 where the mask is 0.
    """
    advantages = raw_gae(token_level_rewards, values, response_mask, as_float(gamma), as_float(lam))
    return whitened(advantages, response_mask), zero_outside(advantages + values, response_mask)


def raw_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """A of `gae` before it is whitened: (B, T), at least float32, 0 where the mask is 0.

    Args:
        lam: a number, or (B,) one per row.
    """
    rewards, values = zero_outside(token_level_rewards, response_mask), zero_outside(values, response_mask)
    valid, wide = response_mask.bool(), torch.promote_types(rewards.dtype, values.dtype)
    advantages = torch.empty_like(rewards, dtype=wide)
    running = next_value = rewards.new_zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(valid[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(valid[:, t], values[:, t].double(), next_value)
        advantages[:, t] = running
    return zero_outside(advantages, response_mask)
