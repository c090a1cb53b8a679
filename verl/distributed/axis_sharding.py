"""A weight of one row per expert, sharded over peer ranks: each of P peers keeps the rows of its experts.

Ranks that keep the same part shard it among themselves as they do with every weight, so the tensor that a rank holds is
a piece of a part; full weights are put together here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl.distributed import Ranks
from verl.distributed.shards import gather


@dataclass(frozen=True)
class AxisSharding:
    """How one weight is sharded over peers.

    Args:
        ranks: all ranks.
        peers: those that hold the full weight together, in the order of its parts.
        mesh: of the ranks that keep the same part as this one.
        rows: of the full weight; the peers divide them.
    """

    ranks: Ranks
    peers: Ranks
    mesh: DeviceMesh
    rows: int

    @property
    def start(self) -> int:
        """The first row of this rank's part."""
        return self.peers.rank * (self.rows // self.peers.size)

    def part(self, full: Tensor, holder: int) -> Tensor:
        """A peer's part of a full weight."""
        count = self.rows // self.peers.size
        return full.narrow(0, holder * count, count)

    def local_part(self, full: nn.Parameter) -> nn.Parameter:
        """This rank's part as a new parameter."""
        return nn.Parameter(self.part(full.detach(), self.peers.rank).clone(), requires_grad=full.requires_grad)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        return torch.Size([self.rows, *part[1:]])

    def gathered(self, tensor: Tensor) -> Tensor:
        """The full weight on every rank. Collective: an all-gather."""
        return torch.cat(self.peers.gather(gather(tensor).contiguous()))

    def scatter(self, full: Tensor, target: Tensor) -> None:
        """Fill a part, or a sharded one's piece, from the full weight on rank 0. Collective.

        Args:
            full: elsewhere only its shape counts (``meta``).
        """
        local = target.to_local() if isinstance(target, DTensor) else target
        for holder in range(self.peers.size):
            values = self.part(full, holder)
            part = torch.empty(values.shape, dtype=target.dtype, device=local.device)
            if self.ranks.is_first:
                part.copy_(values)
            self.ranks.broadcast(part)
            if holder == self.peers.rank:
                start = self.mesh.get_local_rank() * -(-len(part) // self.mesh.size()) if target is not local else 0
                with torch.no_grad():
                    local.copy_(part[start : start + len(local)])
