"""Group policy gradient (Chu et al., arXiv 2504.02546)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, outcome_scores, settle_singletons, spread_over_tokens
from verl.config.schema.algorithm import AlgoConfig
from verl.errors import ConfigError

Correction = Literal["paper", "compat"]


@torch.no_grad()
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    gpg_alpha: Correction = "paper",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Centred rewards, scaled up by the share of responses that carry no gradient.

    With mu the group's mean reward, B the scored rows, M those in groups whose rewards are all equal::

        a_i = alpha * B / (B - M) * (R_i - mu) / f_norm

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        gpg_alpha: ``compat`` scales by B / (number of rewards that are not 0) instead, as upstream does.
        singleton: a group of one gets 0, or its scaled reward with ``raw`` (mu = 0). It always counts in M.

    Returns:
        advantages and returns, which are the same here: (B, T), at least float32.
    """
    if gpg_alpha not in get_args(Correction):
        raise ConfigError("unknown correction", key="gpg_alpha", got=gpg_alpha, allowed=get_args(Correction))
    scores = outcome_scores(token_level_rewards, response_mask)
    groups = Groups.of(index, scores.isfinite())
    centred = groups.centre(scores)
    carries = groups.std(centred) > 0 if gpg_alpha == "paper" else scores != 0
    total, useful = int(groups.counted.sum()), int((carries & groups.counted).sum())
    scale = alpha * (total / useful if useful else 1.0) / f_norm
    advantage = settle_singletons(scale * centred, scale * scores, groups, singleton)
    advantages = spread_over_tokens(advantage, response_mask, token_level_rewards.dtype)
    return advantages, advantages
