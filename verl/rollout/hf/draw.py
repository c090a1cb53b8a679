"""From logits to tokens: filters, inverse CDF and the log-prob of what was drawn, in float32 with float64 sums.

A token is the first one at which the cumulative probability exceeds the request's uniform number. The sum is taken in
two levels (blocks of the vocabulary, then inside one block), so that a large vocabulary costs one pass of additions
instead of a full scan. Every row is computed from itself alone.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.rollout.base import SamplingParams

BLOCK = 128
"""Vocabulary entries per block of the two-level sum."""
MAX_ELEMENTS = 1 << 24
"""Rows are taken in slices of about this many logits, which bounds the memory of the float32 copies."""


@dataclass(frozen=True)
class DrawColumns:
    """The sampling settings of R rows as columns; None where no row needs the step."""

    temperature: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    greedy: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device) -> DrawColumns:
        filtered = [not s.is_greedy for s in rows]
        temperature = [s.temperature if s.temperature > 0 else 1.0 for s in rows]
        top_k = [s.top_k if filter_ else -1 for s, filter_ in zip(rows, filtered)]
        top_p = [s.top_p if filter_ else 1.0 for s, filter_ in zip(rows, filtered)]
        return cls(
            _column(temperature, device) if any(t != 1.0 for t in temperature) else None,
            _column(top_k, device) if any(k > 0 for k in top_k) else None,
            _column(top_p, device, torch.float64) if any(p < 1 for p in top_p) else None,
            None if all(filtered) else ~_column(filtered, device),
        )

    def slice(self, rows: slice) -> DrawColumns:
        parts = (self.temperature, self.top_k, self.top_p, self.greedy)
        return DrawColumns(*(None if part is None else part[rows] for part in parts))


def _column(values: list, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def raw_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(R,) float32 log-probs of one token per row of (R, V) logits as they are, in float64 sums as in `draw_tokens`."""
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    parts = [
        -torch.nn.functional.cross_entropy(logits[i : i + step].double(), tokens[i : i + step], reduction="none")
        for i in range(0, logits.shape[0], step)
    ]
    return torch.cat(parts).float()


def draw_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, columns: DrawColumns, never: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row.

    Args:
        logits: (R, V), any float dtype.
        uniforms: (R,) float64 in [0, 1).
        never: (N,) int64 tokens that are not drawn. Log-probs of the others are those of the distribution with them,
            which the trainer computes, too.

    Returns:
        tokens (R,) int64 and log_probs (R,) float32. A log-prob that is not finite means that the row's logits were
        not: the token is meaningless then.
    """
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    if logits.shape[0] <= step:
        return _draw(logits, uniforms, columns, never)
    parts = [
        _draw(logits[i : i + step], uniforms[i : i + step], columns.slice(slice(i, i + step)), never)
        for i in range(0, logits.shape[0], step)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _draw(
    logits: torch.Tensor, uniforms: torch.Tensor, columns: DrawColumns, never: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float()
    if columns.temperature is not None:
        scores = scores / columns.temperature[:, None]
    excluded = None
    if never is not None:
        excluded = scores[:, never]
        scores = scores.index_fill(-1, never, -torch.inf)
    if columns.top_k is not None:
        scores = keep_top_k(scores, columns.top_k)
    if columns.top_p is not None:
        scores = keep_top_p(scores, columns.top_p)
    largest = scores.amax(-1, keepdim=True)
    weights, block_sums = _weights(scores, largest)
    cumulative = block_sums.double().cumsum(-1)
    total = cumulative[:, -1:]
    tokens = _invert(weights, block_sums, cumulative, uniforms[:, None] * total)
    if columns.greedy is not None:
        tokens = torch.where(columns.greedy, scores.argmax(-1), tokens)
    sampled = scores.gather(-1, tokens[:, None])
    if excluded is not None:
        total = total + (excluded - largest).double().exp().sum(-1, keepdim=True)
    return tokens, ((sampled - largest).double() - total.log()).squeeze(-1).float()


def _weights(scores: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(scores - largest) as (R, blocks, BLOCK), zero-padded, and the sum of each block."""
    rows, vocab = scores.shape
    blocks = -(-vocab // BLOCK)
    if blocks * BLOCK == vocab:
        flat = (scores - largest).exp_()
    else:
        flat = scores.new_zeros(rows, blocks * BLOCK)
        torch.sub(scores, largest, out=flat[:, :vocab])
        flat[:, :vocab].exp_()
    weights = flat.view(rows, blocks, BLOCK)
    return weights, weights.sum(-1)


def _invert(
    weights: torch.Tensor, block_sums: torch.Tensor, cumulative: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Index of the first entry whose cumulative sum exceeds ``target`` (R, 1); never an entry of weight 0."""
    if weights.device.type == "cpu":  # elsewhere asking whether it was enough would wait for the device
        tokens, least = _invert_without_rounding(weights, block_sums, cumulative, target)
        if least > 0:
            return tokens
    block = _first_above(cumulative, block_sums, target)
    before = cumulative.gather(-1, block) - block_sums.gather(-1, block)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
    entry = _first_above(inside.double().cumsum(-1), inside, target - before)
    return (block * BLOCK + entry).squeeze(-1)


def _invert_without_rounding(
    weights: torch.Tensor, block_sums: torch.Tensor, cumulative: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The same if every target is inside its block, as nearly always; also the least weight of the chosen entries.

    A target beyond its block, or beyond all blocks, leads to the last entry. If that has a weight it is the right one.
    """
    rows, blocks = block_sums.shape
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks - 1)
    before = cumulative.gather(-1, block) - block_sums.gather(-1, block)
    inside = weights.flatten(0, 1).index_select(0, torch.arange(0, rows * blocks, blocks) + block[:, 0])
    entry = torch.searchsorted(inside.double().cumsum(-1), target - before, right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + entry).squeeze(-1), float(inside.gather(-1, entry).min())


def _first_above(cumulative: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(R, 1) first index with cumulative > target and weight > 0; the last one with weight > 0 if there is none.

    Rounding makes both conditions necessary: block sums are float32, so a target may be just beyond its block.
    """
    count = cumulative.shape[-1]
    index = torch.searchsorted(cumulative, target, right=True)  # a sum never falls
    positive = weights > 0
    order = torch.arange(count, device=weights.device)
    last = torch.where(positive, order, 0).amax(-1, keepdim=True)
    first = torch.where(positive & (order >= index), order, count).amin(-1, keepdim=True)
    return torch.where(first < count, first, last)


def keep_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """-inf on everything below the k-th largest score of its row; ties with it stay. ``top_k`` below 1 keeps all."""
    vocab = scores.shape[-1]
    num_kept = torch.where(top_k < 1, vocab, top_k).clamp(max=vocab)
    limited = num_kept < vocab
    if not bool(limited.any()):
        return scores
    widest = int(num_kept[limited].max())
    best = scores.topk(widest, dim=-1).values
    smallest = best.gather(-1, num_kept.clamp(max=widest)[:, None] - 1)
    return scores.masked_fill(limited[:, None] & (scores < smallest), float("-inf"))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """-inf on everything outside the nucleus (Holtzman et al., arXiv 1904.09751).

    The nucleus is the shortest run of tokens, most probable first (equal ones by id), that reaches ``top_p``.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1).double()
    before = probs.cumsum(-1) - probs
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), float("-inf"))
