"""Entropy control by the covariance of advantage and log-probability (Cui et al., arXiv 2505.22617).

Tokens on which both are high drive the entropy down: C = (A - mean A) (log_prob - mean log_prob), with means over the
valid tokens of the micro-batch. So these two losses depend on the size of the micro-batches, as in the paper's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.blocks import Scratch, comparable, positions, row_blocks
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Changes, Inputs, Means, Terms, exp_, policy_loss

DRAWS = 64
"""How many tokens clip_cov looks at for each that it wants, before it looks at all of them."""


def num_picked(ratio: float, num_valid: int) -> int:
    """A share of the valid tokens, at least one."""
    return max(1, int(ratio * num_valid))


def covariances(inputs: Inputs, means: Means) -> Iterator[tuple[int, Tensor]]:
    """C of every token, block by block, with the position of the block's first; outside the mask it is meaningless.

    The next block gets the memory of this one.
    """
    width, scratch = inputs.log_prob.shape[1], Scratch(inputs.dtype, inputs.log_prob.device)
    for rows in row_blocks(inputs.log_prob):
        scratch.begin(rows.stop - rows.start, width)
        log_prob = torch.sub(inputs.log_prob[rows].to(inputs.dtype), means.log_prob, out=scratch.take())
        advantage = torch.sub(inputs.advantages[rows].to(inputs.dtype), means.advantage, out=scratch.take())
        yield rows.start * width, advantage.mul_(log_prob)


def leave_out(inputs: Inputs, means: Means, config: Any) -> Changes:
    """A random share of the tokens with lb < C < ub that the clip leaves alone costs nothing.

    They are drawn without replacement from torch's generator, whose state a checkpoint holds: among some random tokens
    if these hold enough of them, else among all.
    """
    settings, clip = config and config.policy_loss, Clip.of(config)
    share, lb, ub = (
        (settings.clip_cov_ratio, settings.clip_cov_lb, settings.clip_cov_ub) if settings else (2e-4, 1.0, 5.0)
    )
    wanted, num_tokens = num_picked(share, means.num_tokens), inputs.log_prob.numel()
    drawn = torch.randint(num_tokens, (min(wanted * DRAWS, num_tokens),)).unique().to(inputs.log_prob.device)
    where, loss = _left_alone(drawn, inputs, means, (lb, ub), clip)
    if len(where) < wanted:
        parts = list[tuple[Tensor, Tensor]]()
        for first, covariance in covariances(inputs, means):
            cov = comparable(covariance)
            found = positions((cov > lb) & (cov < ub)) + first
            parts.append(_left_alone(found, inputs, means, (lb, ub), clip))
        where, loss = (torch.cat(tensors) for tensors in zip(*parts))
    picked = torch.randperm(len(where))[:wanted].to(where.device)
    without = -loss[picked]  # where the clip leaves a token alone its slope is its loss
    return Changes(where[picked], without, without, {"pg_clipfrac": float(len(picked))})


def _left_alone(
    where: Tensor, inputs: Inputs, means: Means, bounds: tuple[float, float], clip: Clip
) -> tuple[Tensor, Tensor]:
    """Those of some positions that are valid, of C inside the bounds and left alone by the clip, and their loss."""
    where = where[inputs.response_mask.take(where) > 0]
    centred = inputs.log_prob.take(where).to(inputs.dtype) - means.log_prob
    cov = centred.mul_(inputs.advantages.take(where).to(inputs.dtype) - means.advantage)
    where = where[(cov > bounds[0]) & (cov < bounds[1])]
    log_ratio, advantages = inputs.at(where)
    plain, clipped = _surrogates(exp_(log_ratio), advantages.neg_(), clip)
    return where[plain >= clipped], plain[plain >= clipped]


def _surrogates(ratio: Tensor, cost: Tensor, clip: Clip, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cost times ratio, in the ratio's memory, and cost times clipped ratio, in that of ``out``."""
    clipped = torch.clamp(ratio, 1 - clip.low, 1 + clip.high, out=out).mul_(cost)
    return ratio.mul_(cost), clipped


@policy_loss(revise=leave_out)
def clip_cov(block: Block, config: Any) -> Terms:
    """PPO's clip (no dual clip), with a random share of the tokens of high covariance taken out.

    With r the ratio::

        x = max(-A r, -A clip(r, 1 - low, 1 + high)),     0 for the chosen tokens
        dx / dlog_prob = -A r      where the clip does not hold and the token is not chosen, else 0

    Chosen is a share of the tokens with lb < C < ub that the clip leaves alone; ``pg_clipfrac`` is how many of all
    tokens they are. Settings: policy_loss.clip_cov_ratio (the share), clip_cov_lb, clip_cov_ub, clip_ratio_low,
    clip_ratio_high.
    """
    cost = block.advantages.neg_()
    plain, clipped = _surrogates(block.into_ratio(), cost, Clip.of(config), block.spare())
    is_plain = torch.ge(plain, clipped, out=cost)
    return Terms(torch.maximum(plain, clipped, out=clipped), plain.mul_(is_plain))


def charge_highest(inputs: Inputs, means: Means, config: Any) -> Changes:
    """The share of tokens with the highest C pays beta |d|; of equal ones at the border the first."""
    settings = config and config.policy_loss
    share, beta = (settings.kl_cov_ratio, float(settings.ppo_kl_coef)) if settings else (2e-4, 0.1)
    wanted = num_picked(share, means.num_tokens)
    parts, floor, waiting = list[tuple[Tensor, Tensor]](), -torch.inf, 0
    for first, cov in covariances(inputs, means):
        found = positions(comparable(cov) >= floor)
        parts.append((found + first, cov.take(found)))
        waiting += len(found)
        if waiting > 2 * wanted:  # what is below the highest so far need not be looked at any more
            where, key = _candidates(parts, inputs)
            if len(where) > wanted:
                floor = key.topk(wanted).values[-1].item()
            parts, waiting = [(where[key >= floor], key[key >= floor])], 0
    where, key = _candidates(parts, inputs)
    where = where[key.sort(descending=True, stable=True).indices[:wanted]]
    moved, _ = inputs.at(where)
    return Changes(where, beta * moved.abs(), beta * moved.sign())


def _candidates(parts: list[tuple[Tensor, Tensor]], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Positions inside the mask, ascending, and their C."""
    where, key = (torch.cat(tensors) for tensors in zip(*parts))
    inside = inputs.response_mask.take(where) > 0
    return where[inside], key[inside]


@policy_loss(revise=charge_highest)
def kl_cov(block: Block, config: Any) -> Terms:
    """The unclipped policy gradient, with a KL penalty on the share of tokens of the highest covariance.

    With r the ratio, d its logarithm, beta = policy_loss.ppo_kl_coef::

        x = -A r                  + beta |d|        for the chosen tokens
        dx / dlog_prob = -A r     + beta sign(d)    for the chosen tokens

    ``ppo_kl`` is the mean of |d|. Settings: policy_loss.kl_cov_ratio (the share), policy_loss.ppo_kl_coef.
    """
    loss = block.ratio().mul_(block.advantages.neg_())
    return Terms(loss, loss, {"ppo_kl": block.log_ratio.abs_().sum()})
