"""PRIME (arXiv 2502.01456): leave-one-out advantages from an outcome and from implicit process rewards.

The process rewards come from a model that a recipe adds: beta times the difference of its log-probs and those of its
frozen reference. So this is a function for that recipe and no name of ``algorithm.adv_estimator``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from verl.algorithms.groups import Groups, Singleton, lengths_of, settle_singletons
from verl.algorithms.masked import at_least_float32, zero_outside
from verl.algorithms.recurrence import rewards_to_go
from verl.algorithms.whitening import whitened

EPSILON = 1e-6


def shaped(
    process_rewards: Tensor,
    response_mask: Tensor,
    granularity: str = "token",
    zero_last: bool = False,
    batch_norm: bool = False,
) -> Tensor:
    """(B, T): process rewards as they are paid, 0 outside the mask.

    Args:
        process_rewards, response_mask: (B, T).
        granularity: ``token``, or ``whole``, which puts the sum of a row's process rewards on its last token.
        zero_last: the process reward of the last token is left out (as upstream's recipe does).
        batch_norm: then divide by the largest |sum of p_s over s >= t| of the batch.
    """
    mask = response_mask.bool()
    process, last = zero_outside(process_rewards, mask), _last_token(mask)
    if granularity == "whole":
        process = last * process.sum(dim=-1, keepdim=True)
    if zero_last:
        process = torch.where(last > 0, 0.0, process)
    if batch_norm:
        process = process / (rewards_to_go(process).abs().max() + EPSILON)
    return process


@torch.no_grad()
def prime(
    process_rewards: Tensor,
    acc: Tensor,
    response_mask: Tensor,
    index: Sequence[Hashable],
    process_coef: float = 5.0,
    outcome_coef: float = 5.0,
    granularity: Literal["token", "whole"] = "token",
    zero_last: bool = False,
    batch_norm: bool = False,
    form: Literal["paper", "compat"] = "paper",
    singleton: Singleton = "zero",
    charges: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Both rewards are centred by themselves on the *other* responses to the prompt, then added.

    With p the process rewards, p_j their mean over the tokens of row j, n the size of the group::

        p~_t = p_t - sum of p_j over j != i / (n - 1)                       (paper)
        p~_t = n / (n - 1) p_t - sum of all p_j / (n - 1)                   (compat: as upstream's recipe)
        o~   = acc - mean of acc over j != i                                on the last valid token
        G_t  = sum over valid s >= t of (process_coef p~_s + outcome_coef o~_s + charges_s)
        advantages = (G - mean) / std over the valid tokens,  returns = G

    Args:
        process_rewards, response_mask: (B, T).
        acc: (B,) the outcome, 0 or 1.
        index: (B,) prompt id of each row.
        granularity, zero_last, batch_norm: see `shaped`, which comes first.
        singleton: a group of one gets 0 in the mean, or its own rewards without a baseline with ``raw``.
        charges: (B, T) further rewards without a baseline, such as a KL with its minus sign; None for none.
    """
    mask = response_mask.bool()
    process, last = shaped(process_rewards, mask, granularity, zero_last, batch_norm), _last_token(mask)
    lengths = lengths_of(response_mask)
    groups = Groups.of(index, (lengths > 0) & acc.isfinite() & process.isfinite().all(dim=-1))
    others = (groups.size() - 1).clamp(min=1)
    means = process.sum(dim=-1).double() / lengths.clamp(min=1)
    self_means = 0.0 if form == "compat" else torch.where(groups.counted, means, 0.0)
    shift = (groups.sum(means) - self_means) / others
    scale = groups.size() / others if form == "compat" else torch.ones_like(others)
    outcome = (acc.double() - (groups.sum(acc) - acc.double()) / others)[:, None]
    centred = process_coef * (scale[:, None].to(process) * process - shift[:, None].to(process))
    charged = 0.0 if charges is None else charges
    rewards = zero_outside(centred + outcome_coef * outcome.to(process) * last + charged, mask)
    alone = zero_outside(process_coef * process + outcome_coef * acc[:, None].to(process) * last + charged, mask)
    share = settle_singletons(torch.zeros_like(means), torch.ones_like(means), groups, singleton)
    grouped = (groups.counted & (groups.size() > 1))[:, None]
    returns = zero_outside(rewards_to_go(torch.where(grouped, rewards, 0.0)), mask)
    returns = returns + zero_outside(rewards_to_go(torch.where(share[:, None] > 0, alone, 0.0)), mask)
    return whitened(returns, mask & groups.counted[:, None]), returns


def _last_token(mask: Tensor) -> Tensor:
    """(B, T): 1 on the last valid token of each row, else 0."""
    after = mask.flip(-1).cumsum(dim=-1).flip(-1)
    return at_least_float32((after == 1) & mask)
