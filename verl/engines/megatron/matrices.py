"""Muon over Megatron-Core's weights: the matrices of the Hugging Face model, complete, from the ranks that cut them.

Megatron-Core lays query, key and value into one weight, and gate and up; its own Muon may make such a weight, or each
tensor-parallel rank's part of one, orthogonal by itself. Here every Hugging Face matrix is one, as in the plain engine,
so that the update depends neither on the engine nor on the number of ranks. Embeddings, the head, vectors and the
experts of a mixture, which Hugging Face stacks, take AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.config.schema.role import OptimizerConfig
from verl.distributed import Ranks
from verl.engines.megatron.weights import Bound, WeightTable
from verl.engines.muon import Direct, Muon
from verl.models.megatron import EMBEDDING, HALVES, OUTPUT, fused
from verl.weight_sync.resharding import Weight


def build_sharded_muon(
    table: WeightTable, bound: Iterable[Bound], masters: dict[nn.Parameter, nn.Parameter], optim: OptimizerConfig
) -> Muon:
    """Of the weights that this rank steps.

    Args:
        bound: these weights.
        masters: parameter -> what is optimised for it.
    """
    of = {masters[b.parameter]: b for b in bound}
    excluded = (EMBEDDING.ours, OUTPUT.ours)  # a value head has the name of the output layer
    matrices = [p for p, b in of.items() if p.dim() == 2 and not b.expert and b.slot.ours not in excluded]
    # A rank that owns no weight still has learning rates and a state to report.
    parameters = list(of) or [nn.Parameter(torch.zeros(0))]
    arguments = dict(optim.override_optimizer_config or {})
    spread, betas = Matrices(table, of), (optim.betas[0], optim.betas[1])
    return Muon(parameters, matrices, optim.lr, optim.weight_decay, betas, **arguments, spread=spread)


class Matrices:
    """A `Spread` over tensor-parallel ranks, which take turns: each makes as many matrices orthogonal as the others.

    Args:
        of: what is optimised -> the weight that it stands for.
    """

    def __init__(self, table: WeightTable, of: dict[nn.Parameter, Bound]):
        self.table, self.of = table, of

    def __call__(
        self,
        parameters: list[nn.Parameter],
        update_of: Callable[[nn.Parameter], Tensor],
        direct: Direct,
        factor: Callable[[Sequence[int]], float],
    ) -> Iterator[tuple[nn.Parameter, Tensor, float]]:
        def scaled(matrix: Tensor) -> Tensor:
            return direct(matrix) * factor(matrix.shape)

        ranks = self.table.groups.tensor
        for first in range(0, len(parameters), ranks.size):
            some = parameters[first : first + ranks.size]
            parts = [part for p in some for part in self._parts(p, update_of(p))]
            directions = iter(_in_turn(parts, scaled, ranks))
            for p in some:
                slot = self.of[p].slot
                updates = [next(directions) for _ in slot.theirs]
                if slot.form == HALVES:
                    updates = [part.flatten(0, 1) for part in updates]
                yield p, fused(slot.form, updates, self.table.groups_here), 1.0

    def _parts(self, p: nn.Parameter, update: Tensor) -> Iterator[tuple[Weight, Tensor]]:
        """This rank's piece of each Hugging Face matrix in a weight."""
        bound = self.of[p]
        for name, weight in zip(bound.slot.theirs, bound.weights):
            yield weight, self.table.piece(name, lambda _: update)


def _in_turn(parts: list[tuple[Weight, Tensor]], scaled: Direct, ranks: Ranks) -> list[Tensor]:
    """The pieces of the directions. Collective over tensor-parallel ranks, in the order of the parts."""
    cut = [weight.cut if ranks.size > 1 else None for weight, _ in parts]
    complete: dict[int, Tensor] = {}
    for number, (axis, (_, piece)) in enumerate(zip(cut, parts)):
        if axis is None:  # every rank has all of it
            complete[number] = piece
            continue
        owner, pieces = number % ranks.size, None
        if ranks.rank == owner:
            pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(ranks.size)]
        dist.gather(piece.contiguous(), pieces, group=ranks.group, group_dst=owner)
        if pieces is not None:
            complete[number] = torch.cat(pieces, axis)
    directions = {n: scaled(matrix.flatten(0, -2)).view(matrix.shape) for n, matrix in complete.items()}
    answers = []
    for number, (axis, (_, piece)) in enumerate(zip(cut, parts)):
        if axis is None:
            answers.append(directions[number])
            continue
        owner, local = number % ranks.size, torch.empty_like(piece, memory_format=torch.contiguous_format)
        pieces = None
        if ranks.rank == owner:
            pieces = [part.contiguous() for part in directions[number].chunk(ranks.size, axis)]
        dist.scatter(local, pieces, group=ranks.group, group_src=owner)
        answers.append(local)
    return answers
