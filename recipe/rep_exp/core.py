"""The bonus for answers whose representations differ from those of the other answers to their prompt.

Tuyls et al. 2025 (arXiv 2510.11686). For an answer y_1 .. y_l to x, with s_t the last hidden state of the initial model
after y_t, and c the mean of h over the answers to x::

    h     = mean over t of s_t, projected to d numbers at random
    bonus = (h - c)' [lambda I + sum over the answers to x of (h - c) (h - c)']^-1 (h - c)
    R     = r + beta bonus                          where an answer to x is right, else R = r

The bonus is the leverage of a row in a ridge regression: from 0, at the mean of the answers, to below 1.

Shapes: B rows, T response tokens, H numbers of a hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from recipe.rep_exp import ExplorationConfig
from verl.algorithms.advantages.grpo import grpo
from verl.algorithms.groups import Groups, Singleton
from verl.protocol.fields import declare_field

BONUS = "exploration_bonus"
"""(B,) float32: the bonus, 0 where it is not paid."""
declare_field(BONUS, torch.float32, ("B",), "recipe.rep_exp", 0.0)


def random_projection(size: int, numbers: int, seed: Sequence[int]) -> Tensor:
    """(H, d) float64, sparse: entries 0, or both signs of one size; squared lengths are the same in expectation.

    With s = sqrt(H), an entry is + or - sqrt(s / d) with probability 1 / (2 s) each (Li, Hastie and Church 2006).

    Args:
        size, numbers: H and d.
    """
    spread, draw = math.sqrt(size), np.random.default_rng(seed)
    signs = draw.choice([1.0, -1.0, 0.0], (size, numbers), p=[0.5 / spread, 0.5 / spread, 1 - 1 / spread])
    return torch.from_numpy(signs * math.sqrt(spread / numbers))


def leverages(representations: Tensor, index: Sequence[Hashable], counted: Tensor, ridge: float) -> Tensor:
    """(B,) float64: the bonus of each counted row, among the counted rows of its group; 0 of other rows.

    With the rows of X centred, X (lambda I + X'X)^-1 X' = K (lambda I + K)^-1 for K = X X', which is as small as the
    group.

    Args:
        representations: (B, d).
        index: (B,) prompt id of each row.
        counted: (B,) bool.
        ridge: lambda.
    """
    groups = Groups.of(index, counted)
    bonus = torch.zeros(len(representations), dtype=torch.float64)
    for number in range(groups.num_groups):
        rows = ((groups.ids == number) & counted).nonzero().flatten()
        centred = representations[rows].double()
        centred = centred - centred.mean(0)
        kernel = centred @ centred.T
        bonus[rows] = torch.linalg.solve(kernel + ridge * torch.eye(len(rows), dtype=torch.float64), kernel).diagonal()
    return bonus


def paid_bonus(bonus: Tensor, right: Tensor, index: Sequence[Hashable], counted: Tensor) -> Tensor:
    """(B,): the bonus where the prompt has a right answer among its counted rows, else 0.

    Without one, novelty alone would pay.
    """
    any_right = Groups.of(index, counted).max(right.double(), counted) > 0
    return torch.where(any_right & counted, bonus, 0.0)


@torch.no_grad()
def explored(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    exploration_bonus: Tensor,
    config: ExplorationConfig,
    norm_adv_by_std_in_grpo: bool = True,
    singleton: Singleton = "zero",
    **_: object,
) -> tuple[Tensor, Tensor]:
    """`verl.algorithms.advantages.grpo.grpo` of the rewards with the bonus.

    Args:
        token_level_rewards, response_mask: (B, T).
        index: (B,) prompt id of each row.
        exploration_bonus: (B,), see `paid_bonus`.
        config: the section ``algorithm``, with ``rep_exp_beta``.

    Returns:
        advantages and returns, which are the same: (B, T).
    """
    share = config.rep_exp_beta * exploration_bonus.double() / token_level_rewards.shape[-1]
    rewards = token_level_rewards.double() + share[:, None]
    advantages, _returns = grpo(
        rewards, response_mask, index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo, singleton=singleton
    )
    advantages = advantages.to(torch.promote_types(token_level_rewards.dtype, torch.float32))
    return advantages, advantages
