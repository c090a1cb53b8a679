"""Expert parallelism: tokens travel to the ranks that hold the experts they were routed to, and back.

Each of P ranks holds E/P of a layer's experts and its own tokens. For N tokens of K experts and width H a forward pass
sends about (P-1)/P * N * K * H numbers each way per layer and rank, depending on the router; the backward pass as many.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from verl.device import AutogradContext
from verl.distributed.ranks import Ranks

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertExchange:
    """What stands in for the forward pass of a layer's experts, of which this rank holds its part.

    Args:
        compute: (M, H) states, (M, 1) numbers of own experts from 0, (M, 1) weights -> (M, H).
        per_rank: experts per rank; rank r holds those from r * per_rank on.
        peers: the ranks that hold all experts together.
    """

    def __init__(self, compute: Compute, per_rank: int, peers: Ranks):
        self.compute, self.per_rank, self.peers = compute, per_rank, peers

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """(N, H) states, (N, K) experts, (N, K) weights -> (N, H): the weighted sum of the experts' outputs."""
        assigned, order = experts.flatten().sort(stable=True)
        token = order // experts.shape[1]
        size = self.peers.size
        there = torch.bincount(assigned // self.per_rank, minlength=size)
        here = torch.empty_like(there)
        # All-to-all over the ranks of the experts, layer after layer: the row counts, then expert numbers and states,
        # then the outputs back; backwards in the opposite order. A rank without tokens enters, too.
        dist.all_to_all_single(here, there, group=self.peers.group)
        sent, received = there.tolist(), here.tolist()
        numbers = _exchanged(assigned, sent, received, self.peers)
        states = _Exchange.apply(hidden.index_select(0, token), sent, received, self.peers)  # type: ignore[no-untyped-call]
        outputs = self._compute_local(states, numbers - self.peers.rank * self.per_rank)
        back = _Exchange.apply(outputs, received, sent, self.peers)  # type: ignore[no-untyped-call]
        share = weights.flatten().index_select(0, order).unsqueeze(-1)
        return torch.zeros_like(hidden).index_add(0, token, (back * share).to(hidden.dtype))

    def _compute_local(self, states: Tensor, numbers: Tensor) -> Tensor:
        """The local experts on the tokens of all ranks.

        Gradients of weights are averaged over the ranks that hold the same experts, which are P times fewer than all:
        backwards they are divided by P, and those of states are not. A rank whose experts get no token computes one
        of zeros, so that its weights have a gradient as those of the others do.
        """
        count, size = len(states), self.peers.size
        if not count:  # joined, not replaced: backwards every rank must come through the exchange
            states = torch.cat([states, states.new_zeros(1, states.shape[-1])])
            numbers = numbers.new_zeros(1)
        states = _ScaledBackwards.apply(states, float(size))  # type: ignore[no-untyped-call]
        outputs = self.compute(states, numbers.unsqueeze(-1), states.new_ones(len(states), 1))
        return _ScaledBackwards.apply(outputs, 1 / size)[:count]  # type: ignore[no-any-return, no-untyped-call]


def _exchanged(values: Tensor, sent: list[int], received: list[int], peers: Ranks) -> Tensor:
    """Rows in the order of their receivers go out; rows in the order of their senders come in. Collective."""
    arrived = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(arrived, values.contiguous(), received, sent, group=peers.group)
    return arrived


class _ScaledBackwards(torch.autograd.Function):
    """``x``, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, sent: list[int], received: list[int], peers: Ranks) -> Tensor:
        ctx.how = (received, sent, peers)
        return _exchanged(values, sent, received, peers)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], *ctx.how), None, None, None
