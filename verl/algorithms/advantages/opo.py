"""On-policy RL with the optimal reward baseline (arXiv 2505.23585)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, lengths_of, outcome_scores, settle_singletons, spread_over_tokens
from verl.config.schema.algorithm import AlgoConfig


@torch.no_grad()
def opo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Reward minus the baseline of least variance, if the squared gradient of a response grows with its length.

    With l_i the valid tokens of a row::

        b   = sum_j l_j R_j / sum_j l_j              over the group; 0 where it has no token
        a_i = R_i - b

    Meant for exact on-policy updates (one mini-batch, one epoch) without KL and entropy terms.

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        singleton: a group of one gets 0, or its reward with ``raw`` (b = 0).

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    lengths = lengths_of(response_mask)
    centred = groups.centre(scores)  # the weights sum to one, so only rewards relative to each other matter
    baseline = groups.sum(lengths * centred) / groups.sum(lengths).clamp(min=1)
    advantage = settle_singletons(centred - baseline, scores, groups, singleton)
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages
