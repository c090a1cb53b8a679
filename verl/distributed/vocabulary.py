"""Log-probs and entropy where each rank holds the logits of a part of the vocabulary; the logits are never gathered.

Three numbers per row cross the ranks (maximum, normaliser, the label's logit), a fourth and fifth with the other
statistics. Gradients are closed forms in the rank's own logits z with p = softmax(z) over the full vocabulary:

    d log p_y / dz = [y] - p        d H / dz = -p (log p + H)        d (sum p^2) / dz = 2 p (p - sum p^2)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.device import AutogradContext

STATISTICS = ("log_probs", "entropy", "sum_pi_squared")


def statistics_from_parts(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """`STATISTICS` of rows whose vocabulary is spread over ``group``.

    Args:
        logits: (N, v) float32, the logits of tokens ``first`` to ``first + v`` of the vocabulary; v may differ by rank.
        labels: (N,) int64, tokens of the full vocabulary.
        group: null: this rank holds all of it.

    Returns:
        (N,) float32 each, the same on all ranks of the group.
    """
    return list(_Statistics.apply(logits, labels, first, group))


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = logits.shape[-1]
        highest = logits.amax(-1) if width else logits.new_full(logits.shape[:-1], -torch.inf)
        _reduce(highest, dist.ReduceOp.MAX, group)
        normaliser = _reduce((logits - highest.unsqueeze(-1)).exp().sum(-1), dist.ReduceOp.SUM, group)
        log_p = logits - (highest + normaliser.log()).unsqueeze(-1)
        p = log_p.exp()
        here = (labels >= first) & (labels < first + width)
        column = torch.where(here, labels - first, 0)
        label = torch.where(here, log_p.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0) if width else normaliser * 0
        # A logit of -inf has probability 0, and 0 log 0 counts as 0.
        plogp = torch.where(p > 0, p * log_p, 0.0)
        sums = _reduce(torch.stack((label, plogp.sum(-1), p.square().sum(-1))), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(p, log_p, here, column, sums)
        return sums[0].clone(), -sums[1], sums[2].clone()

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, log_p, here, column, sums = ctx.saved_tensors
        by_log_prob, by_entropy, by_square = (grad.unsqueeze(-1) for grad in grads)
        entropy, square = -sums[1].unsqueeze(-1), sums[2].unsqueeze(-1)
        gradient = -p * by_log_prob - torch.where(p > 0, p * (log_p + entropy), 0.0) * by_entropy
        gradient += 2 * p * (p - square) * by_square
        if p.shape[-1]:
            gradient.scatter_add_(-1, column.unsqueeze(-1), torch.where(here, grads[0], 0.0).unsqueeze(-1))
        return gradient, None, None, None


def _reduce(values: Tensor, how: Any, group: dist.ProcessGroup | None) -> Tensor:
    """In place, over the ranks that hold a part of the vocabulary each. Collective: the maximum, then the sums."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, how, group=group)
    return values
