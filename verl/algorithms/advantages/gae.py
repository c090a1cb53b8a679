"""Generalized advantage estimation (Schulman et al., arXiv 1506.02438; PPO, arXiv 1707.06347)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.blocks import cleaned, float_mask, row_blocks
from verl.algorithms.recurrence import following, suffix_sum
from verl.algorithms.whitening import Moments
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
    lam = as_float(lam)
    return decoupled_gae(token_level_rewards, values, response_mask, as_float(gamma), lam, lam)


def decoupled_gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam_policy: float | Tensor,
    lam_critic: float | Tensor,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`gae` with one lambda for the advantages and another for the returns; each a number, or (B,) one per row.

    Args:
        out: two (B, T) tensors of at least float32 that receive the results.
    """
    wide = torch.promote_types(torch.promote_types(token_level_rewards.dtype, values.dtype), torch.float32)
    if out is None:
        out = torch.empty_like(values, dtype=wide), torch.empty_like(values, dtype=wide)
    advantages, returns = out
    moments = Moments()
    for rows in row_blocks(values):
        valid = float_mask(response_mask[rows], wide)
        critic = cleaned(values[rows].to(wide), valid)
        deltas = cleaned(token_level_rewards[rows].to(wide), valid).sub_(critic)
        deltas.add_(following(critic, valid), alpha=gamma).mul_(valid)
        raw = suffix_sum(deltas, valid, _row_discount(gamma, lam_policy, rows)).mul_(valid)
        target = raw
        if lam_critic is not lam_policy:
            target = suffix_sum(deltas, valid, _row_discount(gamma, lam_critic, rows)).mul_(valid)
        torch.add(target, critic, out=returns[rows])
        moments.add(raw, valid)
        advantages[rows] = raw
    return moments.whiten(advantages, response_mask), returns


def _row_discount(gamma: float, lam: float | Tensor, rows: slice) -> float | Tensor:
    return gamma * lam[rows, None] if isinstance(lam, Tensor) else gamma * lam
