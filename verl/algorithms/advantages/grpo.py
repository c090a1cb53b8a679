"""Group-relative advantages (GRPO, arXiv 2402.03300) and their unnormalised form (Dr. GRPO, arXiv 2503.20783)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, outcome_scores, settle_singletons, spread_over_tokens
from verl.config.schema.algorithm import AlgoConfig


@torch.no_grad()
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each response against the other responses to its prompt.

    With R_i the sum of a row's rewards, mu and sigma the mean and the sample standard deviation (n - 1) of its group::

        a_i = (R_i - mu) / (sigma + epsilon)         norm_adv_by_std_in_grpo
        a_i =  R_i - mu                              else (Dr. GRPO; use loss_agg_mode=seq-mean-token-sum-norm with it)
        advantages[i, t] = a_i * mask[i, t]

    Equal rewards in a group give exactly 0. A group of one gets 0, or with ``singleton="raw"`` mu = 0 and sigma = 1.
    A row whose reward is NaN takes no part in its group and gets 0.

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    centred = groups.centre(scores)
    scale = groups.std(centred) + epsilon if norm_adv_by_std_in_grpo else 1.0
    raw = scores / (1.0 + epsilon) if norm_adv_by_std_in_grpo else scores
    advantage = settle_singletons(centred / scale, raw, groups, singleton)
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages
