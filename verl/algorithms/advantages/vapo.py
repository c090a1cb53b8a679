"""The advantages of VAPO (arXiv 2504.05118): two lambdas, one of them by the length of the response."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages.gae import raw_gae
from verl.algorithms.groups import lengths_of
from verl.algorithms.masked import zero_outside
from verl.algorithms.whitening import whitened
from verl.config.schema.algorithm import AlgoConfig
from verl.metrics import as_float

LENGTH_ALPHA, LAM_CRITIC = 0.05, 1.0


@torch.no_grad()
def vapo(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    config: AlgoConfig | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """`gae` twice over the same values: long credit for the critic's targets, adapted credit for the policy.

    With l the valid tokens of a row::

        lambda of the policy = clip(1 - 1 / (alpha l), 0, 1)     so that sum_t lambda^t stays proportional to l
        lambda of the critic = 1                                 its targets are the rewards to go

    Args:
        token_level_rewards, values, response_mask: (B, T).
        lam: lambda of the policy where ``algorithm.vapo_length_alpha`` is null (decoupled GAE alone).
        config: the section ``algorithm``, for ``vapo_length_alpha`` (0.05) and ``vapo_lam_critic`` (1).

    Returns:
        advantages (whitened) and returns, (B, T), at least float32, 0 where the mask is 0.
    """
    alpha: float | None = LENGTH_ALPHA
    lam_critic = LAM_CRITIC
    if config is not None:
        alpha, lam_critic = config.vapo_length_alpha, config.vapo_lam_critic
    gamma = as_float(gamma)
    lam_policy: float | Tensor = as_float(lam)
    if alpha is not None:
        lam_policy = length_adaptive_lam(lengths_of(response_mask), alpha)
    advantages = raw_gae(token_level_rewards, values, response_mask, gamma, lam_policy)
    targets = raw_gae(token_level_rewards, values, response_mask, gamma, float(lam_critic)) + values
    return whitened(advantages, response_mask), zero_outside(targets, response_mask)


def length_adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """(B,) -> (B,): ``clip(1 - 1 / (alpha l), 0, 1)``; responses of up to 1 / alpha tokens get 0."""
    return (1.0 - 1.0 / (alpha * lengths.clamp(min=1.0))).clamp(0.0, 1.0)
