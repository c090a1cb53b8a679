"""Gradients of this rank's weights: summed over the ranks that hold a part of them, in float32, and their norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from verl.distributed import Ranks
from verl.engines.megatron.parallel import MegatronSizes, ParallelGroups
from verl.engines.megatron.weights import Bound
from verl.models.megatron import EMBEDDING, WHOLE

BUCKET_BYTES = 64 << 20


class Gradients:
    """What the optimizer sees.

    Weights in bf16 have float32 gradients, which accumulate over micro-batches, and float32 master copies that
    the optimizer steps; float32 weights are their own.

    Attributes:
        masters: parameter -> what is optimised for it.
    """

    def __init__(self, bound: list[Bound], sizes: MegatronSizes, groups: ParallelGroups, ranks: Ranks, trains: bool):
        self.bound, self.sizes, self.groups, self.ranks = bound, sizes, groups, ranks
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in (b.parameter for b in bound):
            low = trains and parameter.dtype != torch.float32
            self.masters[parameter] = nn.Parameter(parameter.detach().float()) if low else parameter
            if low:
                parameter.register_post_accumulate_grad_hook(self._add_up)

    @torch.no_grad()
    def _add_up(self, parameter: Tensor) -> None:
        master = self.masters[parameter]  # type: ignore[index]
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        master.grad.add_(parameter.grad)
        parameter.grad = None

    def clear(self) -> None:
        """Forget the gradients of the step before."""
        for parameter, master in self.masters.items():
            parameter.grad = master.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sum each gradient over the ranks that computed a part of it. Collective."""
        for bound in self.bound:
            master = self.masters[bound.parameter]
            if master.grad is None:  # an expert without tokens; the others wait for it in the collective
                master.grad = torch.zeros_like(master)
        parts = [b for b in self.bound if b.slot.partial or getattr(b.parameter, "sequence_parallel", False)]
        self._sum(parts, self.groups.tensor)
        if self.groups.embedding is not None:
            self._sum([b for b in self.bound if self._tied(b)], self.groups.embedding)
        self._sum([b for b in self.bound if not b.expert], self.groups.data)
        self._sum([b for b in self.bound if b.expert], self.groups.expert_data)

    def norm(self) -> Tensor:
        """L2 norm over the full model: a gradient that several ranks hold counts once."""
        local_sum = torch.zeros((), dtype=torch.float64)
        for bound in self.bound:
            grad = self.masters[bound.parameter].grad
            if grad is not None:
                local_sum += grad.double().square().sum().cpu() / self._copies(bound)
        return self.ranks.sum(local_sum).sqrt().float()

    @torch.no_grad()
    def spread(self) -> None:
        """Bring stepped float32 copies back into the weights."""
        for parameter, master in self.masters.items():
            if master is not parameter:
                parameter.copy_(master)

    def _copies(self, bound: Bound) -> int:
        cut = bound.slot.form != WHOLE
        if bound.expert:
            return self.groups.expert_data.size * (1 if cut else self.sizes.expert_tensor)
        twice = 2 if self.groups.embedding is not None and self._tied(bound) else 1
        return self.groups.data.size * (1 if cut else self.sizes.tensor) * twice

    def _tied(self, bound: Bound) -> bool:
        """Whether the first and the last stage each hold it; where they do not, nothing else is on both."""
        return bound.slot.ours == EMBEDDING.ours and getattr(bound.parameter, "shared_embedding", False)

    def _sum(self, bound: Iterable[Bound], ranks: Ranks) -> None:
        """All-reduce in buckets, in the order of the table, which is that of all ranks of the group."""
        if ranks.size == 1:
            return
        bucket: list[Tensor] = []
        for b in bound:
            grad = self.masters[b.parameter].grad
            assert grad is not None
            if bucket and sum(g.nbytes for g in bucket) + grad.nbytes > BUCKET_BYTES:
                _all_reduce(bucket, ranks)
                bucket = []
            bucket.append(grad)
        if bucket:
            _all_reduce(bucket, ranks)


def _all_reduce(grads: list[Tensor], ranks: Ranks) -> None:
    """Sum in one collective; called by all ranks of the group in the order of the table."""
    flat = torch.cat([grad.flatten() for grad in grads])
    torch.distributed.all_reduce(flat, group=ranks.group)
    at = 0
    for grad in grads:
        grad.copy_(flat[at : at + grad.numel()].view_as(grad))
        at += grad.numel()
