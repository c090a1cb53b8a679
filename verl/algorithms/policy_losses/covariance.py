"""Entropy control by the covariance of advantage and log-probability (Cui et al., arXiv 2505.22617).

Tokens on which both are high drive the entropy down: C = (A - mean A) (log_prob - mean log_prob), with means over the
valid tokens of the micro-batch. So these two losses depend on the size of the micro-batches, as in the paper's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.blocks import comparable, float_mask, inner_product, positions, row_blocks
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Changes, Inputs, Terms, policy_loss


def num_picked(ratio: float, num_valid: int) -> int:
    """A share of the valid tokens, at least one."""
    return max(1, int(ratio * num_valid))


def token_means(inputs: Inputs) -> tuple[Tensor, Tensor, int]:
    """The means of advantage and log-prob over the valid tokens, and how many there are."""
    sums = []
    for rows in row_blocks(inputs.log_prob):
        mask = float_mask(inputs.response_mask[rows], inputs.dtype)
        parts = (inner_product(x[rows].to(inputs.dtype), mask) for x in (inputs.advantages, inputs.log_prob))
        sums.append(torch.stack([*parts, mask.sum()]))
    if not sums:
        return torch.zeros(()), torch.zeros(()), 0
    advantage, log_prob, count = torch.stack(sums).double().sum(dim=0)
    return advantage / count.clamp(min=1), log_prob / count.clamp(min=1), int(count)


def covariance(block: Block, mean_advantage: Tensor, mean_log_prob: Tensor) -> Tensor:
    """(b, T) C of every token; outside the mask it is meaningless."""
    left = block.advantages - mean_advantage.to(block.advantages.dtype)
    return left.mul_(block.uncleaned[0] - mean_log_prob.to(left.dtype))


def joined(parts: list[Changes]) -> Changes:
    """The changes of several blocks as one."""
    where, loss, slope = (torch.cat(tensors) for tensors in list(zip(*parts))[:3])
    keys = [part.key for part in parts if part.key is not None]
    return Changes(where, loss, slope, torch.cat(keys) if keys else None)


def only(changes: Changes, which: Tensor) -> Changes:
    """Some of them."""
    key = None if changes.key is None else changes.key[which]
    return Changes(changes.where[which], changes.loss[which], changes.slope[which], key)


class RandomShare:
    """The tokens that clip_cov leaves out: a random share of those that its blocks propose.

    They are drawn without replacement from torch's generator, whose state a checkpoint holds.
    """

    def __init__(self, inputs: Inputs, config: Any):
        *self.means, num_valid = token_means(inputs)
        self.wanted = num_picked(2e-4 if config is None else config.policy_loss.clip_cov_ratio, num_valid)
        self.parts: list[Changes] = []

    def collect(self, changes: Changes) -> None:
        self.parts.append(changes)

    def chosen(self) -> tuple[Changes | None, dict[str, float]]:
        if not self.parts:
            return None, {}
        every = joined(self.parts)
        picked = torch.randperm(len(every.where))[: self.wanted].to(every.where.device).sort().values
        return only(every, picked), {"pg_clipfrac": float(len(picked))}


@policy_loss(survey=RandomShare)
def clip_cov(block: Block, config: Any) -> Terms:
    """PPO's clip (no dual clip), with a random share of the tokens of high covariance taken out.

    With r the ratio::

        x = max(-A r, -A clip(r, 1 - low, 1 + high)),     0 for the chosen tokens
        dx / dlog_prob = -A r      where the clip does not hold and the token is not chosen, else 0

    Chosen is a share of the tokens with lb < C < ub that the clip leaves alone; ``pg_clipfrac`` is how many of all
    tokens they are. Settings: policy_loss.clip_cov_ratio (the share), clip_cov_lb, clip_cov_ub, clip_ratio_low,
    clip_ratio_high.
    """
    lb, ub = (1.0, 5.0) if config is None else (config.policy_loss.clip_cov_lb, config.policy_loss.clip_cov_ub)
    cov = covariance(block, *block.survey.means)
    clip, cost, ratio = Clip.of(config), block.advantages.neg_(), block.into_ratio()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high).mul_(cost)
    plain = ratio.mul_(cost)
    is_plain = torch.ge(plain, clipped, out=cost)
    loss = torch.maximum(plain, clipped, out=clipped)
    slope = plain.mul_(is_plain)
    cov, mask, plain = comparable(cov), comparable(block.mask), comparable(is_plain)
    where = positions((cov > lb) & (cov < ub) & (mask > 0) & (plain > 0))
    without = -slope.take(where)  # where the clip leaves a token alone its slope is its loss
    return Terms(loss, slope, changes=Changes(where, without, without))


class Highest:
    """The tokens that kl_cov charges: the share with the highest C; of equal ones at the border the first."""

    def __init__(self, inputs: Inputs, config: Any):
        *self.means, num_valid = token_means(inputs)
        self.wanted = num_picked(2e-4 if config is None else config.policy_loss.kl_cov_ratio, num_valid)
        self.best: Changes | None = None
        self.floor = -torch.inf

    def enters(self, cov: Tensor, mask: Tensor) -> float:
        """What a token of a block with these covariances must reach, so that most are never looked at."""
        if self.floor > -torch.inf or cov.numel() <= self.wanted:
            return self.floor
        return cov.masked_fill(mask == 0, -torch.inf).flatten().topk(self.wanted).values[-1].item()

    def collect(self, changes: Changes) -> None:
        every = changes if self.best is None else joined([self.best, changes])
        assert every.key is not None
        order = every.key.sort(descending=True, stable=True).indices[: self.wanted]
        self.best = only(every, order)
        if len(order) == self.wanted:
            self.floor = every.key[order[-1]].item()

    def chosen(self) -> tuple[Changes | None, dict[str, float]]:
        return self.best, {}


@policy_loss(survey=Highest)
def kl_cov(block: Block, config: Any) -> Terms:
    """The unclipped policy gradient, with a KL penalty on the share of tokens of the highest covariance.

    With r the ratio, d its logarithm, beta = policy_loss.ppo_kl_coef::

        x = -A r                  + beta |d|        for the chosen tokens
        dx / dlog_prob = -A r     + beta sign(d)    for the chosen tokens

    ``ppo_kl`` is the mean of |d|. Settings: policy_loss.kl_cov_ratio (the share), policy_loss.ppo_kl_coef.
    """
    beta = 0.1 if config is None else float(config.policy_loss.ppo_kl_coef)
    cov = covariance(block, *block.survey.means)
    where = positions(comparable(cov) >= block.survey.enters(cov, block.mask))
    where = where[block.mask.take(where) > 0]
    moved = block.log_ratio.take(where)
    changes = Changes(where, beta * moved.abs(), beta * moved.sign(), cov.take(where))
    loss = block.ratio().mul_(block.advantages.neg_())
    return Terms(loss, loss, {"ppo_kl": block.log_ratio.abs_().sum()}, changes)
