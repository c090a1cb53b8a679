"""REINFORCE++ with a group baseline (Hu, arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, lengths_of, outcome_scores, settle_singletons, spread_over_tokens
from verl.algorithms.whitening import whitened_rows
from verl.config.schema.algorithm import AlgoConfig


@torch.no_grad()
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of their group, then whitened over all valid tokens of the batch.

    With mu the group's mean reward::

        x[i, t] = (R_i - mu) * mask[i, t]
        advantages = (x - mean) / std

    The whitening weighs tokens, so long responses dominate mean and deviation, and a group of equal rewards does not
    get exactly 0.

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        singleton: before whitening a group of one has 0, or its reward with ``raw``.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    advantage = settle_singletons(groups.centre(scores), scores, groups, singleton)
    advantage = whitened_rows(advantage, lengths_of(response_mask) * groups.counted) * groups.counted
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages
