"""The pass@k objective: only the best response of a group is rewarded, by what it adds (arXiv 2503.19595)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, outcome_scores, settle_singletons, spread_over_tokens
from verl.config.schema.algorithm import AlgoConfig
from verl.errors import ConfigError


@torch.no_grad()
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The marginal contribution of each response to the best reward of its group.

    With sigma the sample standard deviation (n - 1) of the group::

        a_i = max_j R_j - max_{j != i} R_j             0 for all but a single best response; ties for best give all 0
        a_i / (sigma + epsilon)                        norm_adv_by_std_in_grpo

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        singleton: a group of one has no second best: 0, or with ``raw`` an error as in upstream.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.
    """
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    if singleton == "raw" and bool((groups.size()[groups.counted] < 2).any()):
        raise ConfigError(
            "pass@k compares the best response with the second best, and a prompt has a single scored response",
            key="algorithm.singleton",
            got=singleton,
            fix="Set algorithm.singleton=zero, or actor_rollout_ref.rollout.n to 2 or more.",
        )
    everyone = torch.ones_like(groups.counted)
    best = groups.max(scores, everyone)
    is_best = scores == best
    second = groups.max(scores, ~is_best)
    alone_at_the_top = is_best & (groups.sum(is_best.double()) == 1) & (second > -torch.inf)
    advantage = torch.where(alone_at_the_top, best - second, 0.0)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.std(groups.centre(scores)) + epsilon)
    advantage = settle_singletons(advantage, torch.zeros_like(scores), groups, singleton)
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages
