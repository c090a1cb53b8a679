"""Sequence parallelism by exchanging heads for tokens (DeepSpeed-Ulysses, arXiv:2309.14509).

Of a packed row of N tokens each of P ranks holds N/P, with all heads; for attention alone, all N with 1/P of the heads.
One all-to-all in front of attention and one behind it turn the one into the other. Per layer and rank a forward pass
sends (P-1)/P * N/P * (2H + 2h') * d numbers, h' being the KV heads after repetition; the backward pass as many.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl.device import AutogradContext
from verl.distributed.ranks import Ranks


class RowAttention(Protocol):
    """Attention over a whole packed row: (T, H, d), (T, h, d), (T, h, d_v) -> (T, H, d_v)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor: ...


class UlyssesPlan:
    """Attention of a packed row of which this rank has its part of the tokens.

    Args:
        full_row: the attention over the full row.
        peers: the ranks that share the row, in the order of its parts; all parts are equally long.
    """

    def __init__(self, full_row: RowAttention, peers: Ranks):
        self.full_row, self.peers = full_row, peers

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor:
        """(T/P, H, d) queries, (T/P, h, d) keys, (T/P, h, d_v) values -> (T/P, H, d_v); P divides H."""
        size = self.peers.size
        key, value = (repeated_heads(x, query.shape[1], size) for x in (key, value))
        mine = gathered_together([query, key, value], self.peers)
        return gather_heads(self.full_row.attend(mine[0], mine[1], mine[2], how), self.peers)


def repeated_heads(x: Tensor, num_query_heads: int, size: int) -> Tensor:
    """Key-value heads (T, h, d) repeated until every rank gets as many, and those that its queries look at.

    The fewest that will do: all of them once where P divides h, P/h times where h divides P, else one per query head.
    """
    heads = x.shape[1]
    if heads % size == 0:
        return x
    times = size // heads if size % heads == 0 else num_query_heads // heads
    return x.repeat_interleave(times, dim=1)


def gathered_together(heads: list[Tensor], peers: Ranks) -> list[Tensor]:
    """`gather_tokens` of several tensors, in one exchange where their heads are equally wide."""
    if len({(x.shape[-1], x.dtype) for x in heads}) > 1:
        return [gather_tokens(x, peers) for x in heads]
    parts = [x.unflatten(1, (peers.size, -1)) for x in heads]
    joined = gather_tokens(torch.cat(parts, dim=2).flatten(1, 2), peers)
    return list(joined.split([part.shape[2] for part in parts], dim=1))


def gather_tokens(x: Tensor, peers: Ranks) -> Tensor:
    """(T/P, H, d) -> (T, H/P, d): all tokens, this rank's part of the heads. Gradients flow."""
    return _GatherTokens.apply(x, peers)  # type: ignore[no-untyped-call]


def gather_heads(x: Tensor, peers: Ranks) -> Tensor:
    """(T, H/P, d) -> (T/P, H, d): the inverse of `gather_tokens`."""
    return _GatherHeads.apply(x, peers)  # type: ignore[no-untyped-call]


def summed(x: Tensor, peers: Ranks) -> Tensor:
    """The sum over ranks of what each of them has for its own tokens, zero elsewhere.

    Every rank then computes the same loss from it. Backwards each keeps the gradient of its local tokens, times P,
    because gradients are averaged over all ranks, of which P together make one.
    """
    return _Summed.apply(x, peers) if x.numel() else x  # type: ignore[no-untyped-call]


def _tokens_from_heads(x: Tensor, peers: Ranks) -> Tensor:
    tokens, heads, dim = x.shape
    parts = x.view(tokens, peers.size, heads // peers.size, dim).transpose(0, 1).contiguous()
    return _exchanged(parts, peers).flatten(0, 1)


def _heads_from_tokens(x: Tensor, peers: Ranks) -> Tensor:
    tokens, heads, dim = x.shape
    parts = x.contiguous().view(peers.size, tokens // peers.size, heads, dim)
    return _exchanged(parts, peers).transpose(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, peers: Ranks) -> Tensor:
    """Part r goes to rank r; what comes back is in the order of its senders.

    Collective: the ranks of a sequence, before and after the attention of each layer.
    """
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=peers.group)
    return arrived


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, peers: Ranks) -> Tensor:
        ctx.peers = peers
        return _tokens_from_heads(x, peers)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return _heads_from_tokens(grads[0], ctx.peers), None


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, peers: Ranks) -> Tensor:
        ctx.peers = peers
        return _heads_from_tokens(x, peers)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return _tokens_from_heads(grads[0], ctx.peers), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, peers: Ranks) -> Tensor:
        ctx.size = peers.size
        return peers.sum(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None
