"""REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, outcome_scores, settle_singletons, spread_over_tokens
from verl.config.schema.algorithm import AlgoConfig


@torch.no_grad()
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Each response against the mean of the *other* responses to its prompt.

    With n the size of the group and mu its mean reward::

        a_i = R_i - mean of R_j over j != i = n / (n - 1) * (R_i - mu)

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        singleton: a group of one gets 0, or its reward with ``raw``.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    size = groups.size()
    left_out = groups.centre(scores) * size / (size - 1).clamp(min=1)
    advantage = settle_singletons(left_out, scores, groups, singleton)
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages
