"""The baseline of least variance for every position of a group (optimal token baseline, arXiv 2602.07078)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, settle_singletons
from verl.algorithms.masked import at_least_float32, zero_outside
from verl.algorithms.recurrence import rewards_to_go
from verl.config.schema.algorithm import AlgoConfig

Pair = tuple[Tensor, Tensor]


@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
    epsilon: float = 1e-8,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> Pair:
    """Reward-to-go minus a baseline per group and position, weighted by the gradient that a response had until then.

    The squared gradient of log pi(y) with respect to the logits is ``1 - 2 pi(y) + sum_v pi(v)^2``. With rho the
    importance weights (1 without), m the mask, sums over the group::

        G_t = sum of r_s m_s over s >= t
        w_t = (1 - 2 exp(old_log_prob_t) + sum_pi_squared_t) rho_t^2,       W_t = sum of w_s m_s over s <= t
        b_t = sum G_t W_t m_t / (sum W_t m_t + epsilon)
        A_t = (G_t - b_t) m_t,                                              returns = G

    Args:
        token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights: (B, T).
        index: (B,) prompt id of each row.
        handle_zero_tail: where only the longest response of a group is left, its own return would be its baseline and
            its advantage 0; there b = 0 instead.
        singleton: a group of one gets 0, or its reward-to-go with ``raw`` (b = 0). Empty responses do not count.

    Returns:
        advantages and returns: (B, T), at least float32, 0 where the mask is 0.
    """
    mask = response_mask.bool()
    rewards, log_probs, squares = (zero_outside(x, mask) for x in (token_level_rewards, old_log_probs, sum_pi_squared))
    returns = rewards_to_go(rewards)
    groups = Groups.of(index, mask.any(dim=-1) & returns.isfinite().all(dim=-1))
    proxy = zero_outside(1.0 - 2.0 * log_probs.exp() + squares, mask)
    if rollout_is_weights is not None:
        proxy = proxy * zero_outside(rollout_is_weights, mask) ** 2
    weight = zero_outside(proxy.cumsum(dim=-1), mask & groups.counted[:, None])
    baseline = _baseline(zero_outside(returns, mask), weight, groups, epsilon)
    if handle_zero_tail:
        baseline = torch.where(_only_the_longest(mask, groups), 0.0, baseline)
    advantages = zero_outside(returns - baseline, mask)
    return settled(advantages, zero_outside(returns, mask), groups, singleton)


@torch.no_grad()
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    config: AlgoConfig | None = None,
    singleton: Singleton = "zero",
    **_: Any,
) -> Pair:
    """`optimal_token_baseline` for several turns with observations between them.

    Positions count generated tokens: each row is closed up to its valid tokens, and the result is put back in place.
    """
    mask = response_mask.bool()
    close_up, put_back = _without_holes(mask)
    weights = None if rollout_is_weights is None else close_up(rollout_is_weights)
    advantages, returns = optimal_token_baseline(
        close_up(token_level_rewards),
        torch.arange(mask.shape[1], device=mask.device) < mask.sum(dim=-1, keepdim=True),
        index,
        close_up(old_log_probs),
        close_up(sum_pi_squared),
        weights,
        handle_zero_tail,
        epsilon,
        config,
        singleton,
    )
    return put_back(advantages), put_back(returns)


def settled(advantages: Tensor, returns: Tensor, groups: Groups, singleton: Singleton) -> Pair:
    """Groups of one get 0 or their returns, rows that do not count get 0."""
    # One row's factors on its advantages and its returns: (1, 0) in a group, (0, 0 or 1) alone.
    ones = torch.ones(len(groups.ids), dtype=torch.float64, device=advantages.device)
    alone = settle_singletons(torch.zeros_like(ones), ones, groups, singleton)
    grouped = torch.where(groups.counted & (groups.size() > 1), 1.0, 0.0)
    result = torch.where(grouped[:, None] > 0, advantages, torch.where(alone[:, None] > 0, returns, 0.0))
    return result, torch.where(groups.counted[:, None], returns, 0.0)


def _baseline(returns: Tensor, weight: Tensor, groups: Groups, epsilon: float) -> Tensor:
    """(B, T): the weighted mean of the group's returns at each position."""
    shape = (groups.num_groups, returns.shape[1])
    above, below = (torch.zeros(shape, dtype=returns.dtype, device=returns.device) for _ in range(2))
    above.index_add_(0, groups.ids, torch.where(weight != 0, returns * weight, 0.0))
    below.index_add_(0, groups.ids, weight)
    return (above / (below + epsilon))[groups.ids]


def _only_the_longest(mask: Tensor, groups: Groups) -> Tensor:
    """(B, T) bool: positions that a single response of the group reaches."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    length = (mask * positions).amax(dim=-1).double()
    longest = groups.max(length, torch.ones_like(groups.counted))
    is_longest = length == longest
    second = groups.max(length, ~is_longest)
    single = groups.sum(is_longest.double()) == 1
    return (positions > second[:, None]) & single[:, None] & (groups.size() > 1)[:, None]


def _without_holes(mask: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Two functions (B, T) -> (B, T): close every row up to its valid tokens, and the way back."""
    width = mask.shape[1]
    target = torch.where(mask, mask.cumsum(dim=-1) - 1, width)

    def close_up(values: Tensor) -> Tensor:
        valid = zero_outside(values, mask)
        return valid.new_zeros(len(valid), width + 1).scatter_(1, target, valid)[:, :width]

    def put_back(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(at_least_float32(values), (0, 1)).gather(1, target)

    return close_up, put_back
