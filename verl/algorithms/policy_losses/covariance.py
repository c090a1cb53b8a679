"""Entropy control by the covariance of advantage and log-probability (Cui et al., arXiv 2505.22617).

Tokens on which both are high drive the entropy down: C = (A - mean A) (log_prob - mean log_prob), with means over the
valid tokens of the micro-batch. So these two losses depend on the size of the micro-batches, as in the paper's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.blocks import cleaned, float_mask, row_blocks
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Inputs, Terms, policy_loss


def num_picked(ratio: float, num_valid: int) -> int:
    """A share of the valid tokens, at least one."""
    return max(1, int(ratio * num_valid))


def token_means(inputs: Inputs) -> tuple[Tensor, Tensor, int]:
    """The means of advantage and log-prob over the valid tokens, and how many there are."""
    sums = []
    for rows in row_blocks(inputs.log_prob):
        mask = float_mask(inputs.response_mask[rows], inputs.dtype)
        parts = (cleaned(x[rows].to(inputs.dtype), mask) for x in (inputs.advantages, inputs.log_prob))
        sums.append(torch.stack([*(part.sum() for part in parts), mask.sum()]))
    if not sums:
        return torch.zeros(()), torch.zeros(()), 0
    advantage, log_prob, count = torch.stack(sums).double().sum(dim=0)
    return advantage / count.clamp(min=1), log_prob / count.clamp(min=1), int(count)


def covariance(block: Block, mean_advantage: Tensor, mean_log_prob: Tensor) -> Tensor:
    """(b, T) C of every token; outside the mask it is meaningless."""
    left = block.advantages - mean_advantage.to(block.advantages.dtype)
    return left.mul_(block.log_prob - mean_log_prob.to(left.dtype))


def candidates_of_clip_cov(inputs: Inputs, config: Any) -> Tensor:
    """A random share of the tokens with lb < C < ub that PPO's clip leaves alone.

    They are drawn without replacement from torch's generator, whose state a checkpoint holds.
    """
    settings, clip = None if config is None else config.policy_loss, Clip.of(config)
    ratio, low, high = (
        (2e-4, 1.0, 5.0) if settings is None else (settings.clip_cov_ratio, settings.clip_cov_lb, settings.clip_cov_ub)
    )
    *means, num_valid = token_means(inputs)
    found = []
    for rows in row_blocks(inputs.log_prob):
        block = inputs.block(rows)
        cov = covariance(block, *means)
        inside = torch.gt(cov, low, out=torch.empty_like(cov)).mul_(block.mask).mul_(cov.lt_(high))
        cost, ratios = -block.advantages, block.ratio()
        clipped = ratios.clamp(1 - clip.low, 1 + clip.high).mul_(cost)
        inside.mul_(clipped.le_(ratios.mul_(cost)))
        found.append(inside.flatten().nonzero()[:, 0] + rows.start * inputs.log_prob.shape[1])
    every = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
    picked = torch.randperm(len(every))[: num_picked(ratio, num_valid)].to(every.device)
    return every[picked].sort().values


@policy_loss(select=candidates_of_clip_cov)
def clip_cov(block: Block, config: Any) -> Terms:
    """PPO's clip (no dual clip), with a random share of the tokens of high covariance taken out.

    With r the ratio::

        x = max(-A r, -A clip(r, 1 - low, 1 + high)),     0 for the chosen tokens
        dx / dlog_prob = -A r      where the clip does not hold and the token is not chosen, else 0

    ``pg_clipfrac`` is the share of chosen tokens. Settings: policy_loss.clip_cov_ratio (the share), clip_cov_lb,
    clip_cov_ub, clip_ratio_low, clip_ratio_high.
    """
    clip, cost, ratio = Clip.of(config), -block.advantages, block.ratio()
    clipped = ratio.clamp(1 - clip.low, 1 + clip.high).mul_(cost)
    plain = ratio.mul_(cost)
    loss = torch.maximum(plain, clipped)
    slope = plain.mul_(torch.eq(loss, plain, out=clipped))
    for values in (loss, slope):
        values.view(-1)[block.chosen] = 0.0
    return Terms(loss, slope, {"pg_clipfrac": loss.new_tensor(float(len(block.chosen)))})  # type: ignore[arg-type]


def highest_of_kl_cov(inputs: Inputs, config: Any) -> Tensor:
    """The share of tokens with the highest C; of equal ones at the border the first."""
    ratio = 2e-4 if config is None else config.policy_loss.kl_cov_ratio
    *means, num_valid = token_means(inputs)
    wanted = num_picked(ratio, num_valid)
    best, where = torch.zeros(0, dtype=inputs.dtype), torch.zeros(0, dtype=torch.int64)
    for rows in row_blocks(inputs.log_prob):
        block = inputs.block(rows)
        cov = covariance(block, *means)
        floor = best.min() if len(best) >= wanted else cov.new_tensor(-torch.inf)
        some = (cov.amax(dim=-1) > floor).nonzero()[:, 0]  # few rows, once the first blocks have set the floor
        part, position = ((cov[some] > floor) & (block.mask[some] > 0)).nonzero(as_tuple=True)
        best = torch.cat([best.to(cov), cov[some[part], position]])
        where = torch.cat([where.to(some), (rows.start + some[part]) * inputs.log_prob.shape[1] + position])
        best, order = best.topk(min(wanted, len(best)))
        where = where[order]
    return where.sort().values


@policy_loss(select=highest_of_kl_cov)
def kl_cov(block: Block, config: Any) -> Terms:
    """The unclipped policy gradient, with a KL penalty on the share of tokens of the highest covariance.

    With r the ratio, d its logarithm, beta = policy_loss.ppo_kl_coef::

        x = -A r                  + beta |d|        for the chosen tokens
        dx / dlog_prob = -A r     + beta sign(d)    for the chosen tokens

    ``ppo_kl`` is the mean of |d|. Settings: policy_loss.kl_cov_ratio (the share), policy_loss.ppo_kl_coef.
    """
    beta = 0.1 if config is None else float(config.policy_loss.ppo_kl_coef)
    loss = block.ratio().mul_(block.advantages).neg_()
    slope = loss.clone()
    distance = block.log_ratio.abs()
    loss.view(-1)[block.chosen] += beta * distance.view(-1)[block.chosen]
    slope.view(-1)[block.chosen] += beta * block.log_ratio.view(-1)[block.chosen].sign()
    return Terms(loss, slope, {"ppo_kl": distance.sum()})
