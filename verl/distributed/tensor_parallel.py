"""Tensor parallelism: P ranks with equal inputs each hold a part of a layer's weights (Megatron-LM, arXiv:1909.08053).

A column-parallel map takes a whole input and gives this rank's part of the output; a row-parallel map takes that part
and its output is summed over the ranks. In between nothing travels. Per pair of such maps a forward pass sums its
output once over the ranks, and a backward pass the gradient of each input once.

Outside of such pairs all ranks compute the same numbers, and every gradient there is whole on each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.distributed.ranks import Ranks


def copied(x: Tensor, peers: Ranks) -> Tensor:
    """``x``, whose gradient is summed over the ranks, because each of them knows a part of it."""
    return _Copied.apply(x, peers)  # type: ignore[no-untyped-call]


class CopiedOnce:
    """`copied`, once for all maps that read the same tensor one after the other: their gradients travel together."""

    def __init__(self, peers: Ranks):
        self.peers = peers
        self._last: tuple[Tensor, Tensor, bool] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        graph = torch.is_grad_enabled()
        if self._last is None or self._last[0] is not x or self._last[2] != graph:
            self._last = x, copied(x, self.peers), graph
        return self._last[1]

    def forget(self) -> None:
        """Hold no tensor any longer: nothing reads the last one again."""
        self._last = None


def reduced(x: Tensor, peers: Ranks) -> Tensor:
    """The sum over ranks; its gradient is whole on each rank already."""
    return _Reduced.apply(x, peers)  # type: ignore[no-untyped-call]


def scaled_backwards(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by a number."""
    return _ScaledBackwards.apply(x, factor)  # type: ignore[no-untyped-call]


def joined_statistics(
    lse: Tensor, chosen: Tensor, entropy: Tensor | None, squared: Tensor | None, peers: Ranks
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probs, entropies and sums of squared probabilities over a vocabulary of which each rank has a part.

    With w_r = exp(lse_r - lse): log p = sum_r chosen_r - lse, H = lse - sum_r w_r (lse_r - H_r), and the squares sum to
    sum_r w_r^2 s_r.

    Args:
        lse: (N,) log-sum-exp of this rank's logits.
        chosen: (N,) the label's logit on the rank that has it, 0 elsewhere.
        entropy, squared: (N,) of the softmax over this rank's logits alone; None if not wanted.
    """
    wanted = [x for x in (entropy, squared) if x is not None]
    own = torch.stack([lse, chosen, *wanted])
    every = _Gathered.apply(own, peers) if own.numel() else own[None]  # type: ignore[no-untyped-call]
    parts, rest = every[:, 0], iter(every.unbind(1)[2:])
    whole = parts.logsumexp(0)
    weight = (parts - whole).exp()
    return (
        every[:, 1].sum(0) - whole,
        None if entropy is None else whole - (weight * (parts - next(rest))).sum(0),
        None if squared is None else (weight.square() * next(rest)).sum(0),
    )


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Ranks) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.sum(grads[0].contiguous()), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Ranks) -> Tensor:
        return peers.sum(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ScaledBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _Gathered(torch.autograd.Function):
    """(...) -> (P, ...) of all ranks. Every rank goes on to compute the same, so each keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Ranks) -> Tensor:
        ctx.rank = peers.rank
        return torch.stack(peers.gather(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.rank], None
