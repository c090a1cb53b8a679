"""Log-probs and entropy where each rank holds the logits of a part of the vocabulary; the logits are never gathered.

Three numbers per row cross the ranks (maximum, normaliser, the label's logit), a fourth and fifth with the other
statistics; of K listed tokens per row 2 + K, and for the K most likely ones each rank sends its K best. Gradients are
closed forms in the rank's own logits z with p = softmax(z) over the full vocabulary:

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


def candidates_from_parts(logits: Tensor, candidates: Tensor, first: int, group: dist.ProcessGroup | None) -> Tensor:
    """(N, K) log-probs of the tokens (N, K) int64 of the full vocabulary; other arguments of `statistics_from_parts`.

    Collective among the ranks of the group, which all get the same numbers.
    """
    listed: Tensor = _Candidates.apply(logits, candidates, first, group)
    return listed


def top_k_from_parts(logits: Tensor, k: int, first: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-probs (N, k) and int64 ids of the most likely tokens, most likely first; without gradient.

    Args:
        k: at most the size of the vocabulary; other arguments of `statistics_from_parts`.

    Collective among the ranks of the group, which all get the same numbers.
    """
    log_p = logits.detach() - _log_normaliser(logits.detach(), group).unsqueeze(-1)
    best = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    # Every rank sends k, also one with fewer tokens: what fills up is never among the k best of all.
    values, ids = log_p.new_full((len(log_p), k), -torch.inf), best.indices.new_zeros(len(log_p), k)
    values[:, : best.values.shape[-1]] = best.values
    ids[:, : best.indices.shape[-1]] = best.indices + first
    if group is not None and (size := dist.get_world_size(group)) > 1:
        parts = [[torch.empty_like(part) for _ in range(size)] for part in (values, ids)]
        for part, of_ranks in zip((values, ids), parts, strict=True):
            dist.all_gather(of_ranks, part, group=group)
        values, ids = (torch.cat(of_ranks, dim=-1) for of_ranks in parts)
    best = values.topk(k, dim=-1)
    return best.values, ids.gather(-1, best.indices)


class _Candidates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, candidates: Tensor, first: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        log_p = logits - _log_normaliser(logits, group).unsqueeze(-1)
        listed, here, column = _at(log_p, candidates, first)
        ctx.save_for_backward(log_p, here, column)
        return _reduce(listed, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        log_p, here, column = ctx.saved_tensors
        gradient = -log_p.exp() * grads[0].sum(-1, keepdim=True)
        if log_p.shape[-1]:
            gradient.scatter_add_(-1, column, torch.where(here, grads[0], 0.0))
        return gradient, None, None, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_p = logits - _log_normaliser(logits, group).unsqueeze(-1)
        p = log_p.exp()
        label, here, column = (part.squeeze(-1) for part in _at(log_p, labels.unsqueeze(-1), first))
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


def _log_normaliser(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """(N,) logsumexp over all parts of the vocabulary. Collective among the ranks of the group."""
    highest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    _reduce(highest, dist.ReduceOp.MAX, group)
    return highest + _reduce((logits - highest.unsqueeze(-1)).exp().sum(-1), dist.ReduceOp.SUM, group).log()


def _at(log_p: Tensor, tokens: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N, v), tokens (N, K) -> (N, K) each: log-probs, 0 where another rank has a token; whether it is here; where."""
    width = log_p.shape[-1]
    here = (tokens >= first) & (tokens < first + width)
    column = torch.where(here, tokens - first, 0)
    listed = torch.where(here, log_p.gather(-1, column), 0.0) if width else log_p.new_zeros(tokens.shape)
    return listed, here, column


def _reduce(values: Tensor, how: Any, group: dist.ProcessGroup | None) -> Tensor:
    """In place, over the ranks that hold a part of the vocabulary each. Collective: the maximum, then the sums."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, how, group=group)
    return values
