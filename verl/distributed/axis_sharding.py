"""A weight sharded over peer ranks along one of its axes: the experts of a mixture, the columns of a linear layer.

Each of P peers keeps one part of it. Ranks that keep the same part shard it among themselves as they do with every
weight, so the tensor that a rank holds is a piece of a part; whole weights are put together here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from verl.distributed import Ranks
from verl.distributed.shards import gather


@dataclass(frozen=True)
class AxisSharding:
    """How one weight is sharded over peers.

    Args:
        ranks: all ranks.
        peers: those that hold the whole weight together, in the order of its parts.
        mesh: of the ranks that keep the same part as this one; null: none shards it.
        axis: which one is cut.
        length: of that axis in the whole weight.
        blocks: weights that lie one behind the other along the axis, each of which is sharded by itself (the gate and
            the input projection of a fused layer).
        pieces: parts, where they are fewer than peers and peers keep the same one; null: one each.
    """

    ranks: Ranks
    peers: Ranks
    mesh: DeviceMesh | None
    axis: int
    length: int
    blocks: int = 1
    pieces: int | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's part begins and ends, of a weight of one block."""
        return self._bounds(self.peers.rank)

    def _bounds(self, holder: int) -> tuple[int, int]:
        block = self.length // self.blocks
        if self.pieces is not None:
            holder = holder * self.pieces // self.peers.size
        rows = -(-block // (self.pieces or self.peers.size))
        return min(block, holder * rows), min(block, (holder + 1) * rows)

    def part(self, whole: Tensor, holder: int) -> Tensor:
        """What a peer keeps of a whole weight."""
        start, end = self._bounds(holder)
        pieces = [block.narrow(self.axis, start, end - start) for block in whole.chunk(self.blocks, self.axis)]
        return torch.cat(pieces, self.axis) if self.blocks > 1 else pieces[0]

    def own(self, whole: nn.Parameter) -> nn.Parameter:
        """This rank's part as a parameter of its own."""
        return nn.Parameter(self.part(whole.detach(), self.peers.rank).clone(), requires_grad=whole.requires_grad)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        return torch.Size([*part[: self.axis], self.length, *part[self.axis + 1 :]])

    def boxes(self, whole: Sequence[int], low: int, high: int) -> list[list[tuple[int, int]]]:
        """Rows ``low`` to ``high`` of this rank's part: begin and end along each axis of the whole weight, for each of
        its blocks. What is there lies one behind the other in the part, along the axis."""
        start, end = self.bounds
        boxes = []
        for number in range(self.blocks):
            first, before = number * (self.length // self.blocks) + start, number * (end - start)
            box = [(low, high), *((0, length) for length in whole[1:])]
            if self.axis == 0:
                box[0] = (first + max(low - before, 0), first + min(high - before, end - start))
            else:
                box[self.axis] = (first, first + end - start)
            boxes.append(box)
        return [box for box in boxes if all(begin < stop for begin, stop in box)]

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole weight on every rank. Collective."""
        own = gather(tensor)
        holders = range(0, self.peers.size, self.peers.size // (self.pieces or self.peers.size))
        widths = [end - start for start, end in map(self._bounds, holders)]
        missing = widths[0] * self.blocks - own.shape[self.axis]  # the first part is never smaller than others
        if missing:
            own = F.pad(own, (0, 0) * (own.dim() - 1 - self.axis) + (0, missing))
        gathered = self.peers.gather(own.contiguous())
        parts = [gathered[holder].chunk(self.blocks, self.axis) for holder in holders]
        blocks = zip(*parts)
        return torch.cat([p.narrow(self.axis, 0, w) for block in blocks for p, w in zip(block, widths)], self.axis)

    def scatter(self, whole: Tensor, target: Tensor) -> None:
        """Fill a part, or a sharded one's piece, from the whole weight on rank 0. Collective.

        Args:
            whole: elsewhere only its shape counts (``meta``).
        """
        local = target.to_local() if isinstance(target, DTensor) else target
        for holder in range(self.peers.size):
            given = self.part(whole, holder)
            part = torch.empty(given.shape, dtype=target.dtype, device=local.device)
            if self.ranks.is_first:
                part.copy_(given)
            self.ranks.broadcast(part)
            if holder == self.peers.rank:
                mesh = self.mesh if isinstance(target, DTensor) else None
                start = mesh.get_local_rank() * -(-len(part) // mesh.size()) if mesh is not None else 0
                with torch.no_grad():
                    local.copy_(part[start : start + len(local)])
