"""Attention of a packed row sequence by sequence, with a family's additions: windows, soft-capping, dropout.

The path of families and devices that no faster one serves, and what the faster ones are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.models.attention.segments import NO_PREFIX, Segments


@dataclass(frozen=True)
class AttentionVariant:
    """How one layer's attention differs from plain softmax attention.

    Args:
        scaling: scores are multiplied by it.
        window: a token sees itself and this many less one before it; None all.
        softcap: scores are bounded to +-softcap by a tanh.
        dropout: probability of a dropped attention weight.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


def masked_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: AttentionVariant) -> Tensor:
    """(T, H, d) queries, (T, h, d) keys, (T, h, d_v) values -> (T, H, d_v)."""
    parts = []
    for start, length, before in zip(segments.starts, segments.lengths, segments.prefix):
        tokens = slice(start, start + length)
        k, v = key[tokens], value[tokens]
        if before != NO_PREFIX:
            prefix = slice(segments.starts[before], segments.starts[before] + segments.lengths[before])
            k, v = torch.cat((key[prefix], k)), torch.cat((value[prefix], v))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[tokens], k, v))
        parts.append(causal_attention(q, k, v, how)[0].transpose(0, 1))
    return torch.cat(parts)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, how: AttentionVariant, visible: Tensor | None = None
) -> Tensor:
    """(B, H, L, d) queries are the last L of the (B, h, E, d) keys' positions and see keys up to their own.

    Args:
        visible: (B, 1, L, E) or (L, E) bool says instead what a query sees.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    windowed = how.window is not None and num_keys > how.window
    shared_heads = query.shape[1] != key.shape[1]
    if visible is None and num_queries == num_keys and not windowed and how.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=None, dropout_p=how.dropout, is_causal=True, scale=how.scaling,
            enable_gqa=shared_heads,
        )  # fmt: skip
    if visible is None:
        visible = ~_hidden(num_queries, num_keys, how.window if windowed else None, query.device)
    if how.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=how.dropout, scale=how.scaling, enable_gqa=shared_heads
        )
    if shared_heads:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.tanh(query @ key.transpose(2, 3) * (how.scaling / how.softcap)) * how.softcap
    lowest = torch.finfo(scores.dtype).min  # a query that sees nothing, in padding, must not become NaN
    probabilities = scores.masked_fill(~visible, lowest).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(probabilities, how.dropout) @ value


Run = tuple[int, int, tuple[tuple[int, int], ...]]
"""First token of a run, its end, and the ranges of tokens that it sees: all of its sequence up to its end."""


def seeing_ahead(
    made: Tensor, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], how: AttentionVariant
) -> Tensor:
    """Causal attention of a packed row ``made`` (T, H, d_v), with runs whose tokens see each other in both directions.

    A window still hides what is before it. Arguments as in `masked_attention`.
    """
    if not runs:
        return made
    parts, index = [], []
    for first, end, ranges in runs:
        k, v = (torch.cat([x[start:stop] for start, stop in ranges]) for x in (key, value))
        queries, keys = end - first, len(k)
        behind = keys if how.window is None else how.window - 1  # how far back a token sees
        visible = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(keys - queries - behind)
        q, k, v = (x.transpose(0, 1)[None] for x in (query[first:end], k, v))
        parts.append(causal_attention(q, k, v, how, visible)[0].transpose(0, 1))
        index.append(torch.arange(first, end, device=query.device))
    return made.index_copy(0, torch.cat(index), torch.cat(parts).to(made.dtype))


def _hidden(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """(L, E) bool: keys behind the query, or out of its window."""
    keys = torch.arange(num_keys, device=device)
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden
