"""Tensors that are cut along their first axis over the ranks: in from rank 0, one at a time, and gathered.

With hybrid sharding the pieces exist once per shard group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from verl.distributed.ranks import Ranks
from verl.errors import EngineError
from verl.json_text import Json
from verl.protocol.sharding import ShardSpec


def scatter(full: Tensor, target: DTensor) -> None:
    """Fill a sharded tensor from rank 0's full one.

    Args:
        full: on rank 0 the values, on any device and of any dtype; elsewhere only its shape counts (``meta``).
        target: cut along its first axis; of hybrid sharding every copy is filled.

    Raises:
        EngineError: the shapes differ.
    """
    if full.shape != target.shape:
        shape = str(tuple(target.shape))
        raise EngineError("a sharded tensor has another shape", got=tuple(full.shape), allowed=shape)
    local, pieces, group = target.to_local(), _pieces(target), _shard_group(target)
    rows = -(-target.shape[0] // pieces)
    piece = torch.empty((rows, *target.shape[1:]), dtype=target.dtype, device=local.device)
    if _has_first(group):
        parts = _padded_pieces(full.to(local.device, target.dtype), rows, pieces) if dist.get_rank() == 0 else None
        # Ranks that share rank 0's copy come first; each of them then hands its piece to the other copies.
        dist.scatter(piece, parts, group=group, group_src=0)
    if target.device_mesh.ndim == 2:
        dist.broadcast(piece, group=target.device_mesh.get_group(0), group_src=0)
    with torch.no_grad():
        local.copy_(piece[: local.shape[0]])


def first_row(tensor: DTensor) -> int:
    """Where this rank's rows begin; behind the last row where it has none."""
    rows = -(-tensor.shape[0] // _pieces(tensor))
    return min(tensor.shape[0], rows * tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1))


def local_box(tensor: Tensor) -> tuple[ShardSpec, Tensor]:
    """This rank's box of a tensor, along whichever axes it is cut, and its values; of one that is not cut, all of it.

    Raises:
        EngineError: it is cut in a way that is no box.
    """
    if not isinstance(tensor, DTensor):
        return ShardSpec.of(tensor), tensor.detach()
    start, lengths = [0] * tensor.ndim, list(tensor.shape)
    # FSDP2 cuts last what tensor-parallel ranks have already cut, though its axis of the mesh comes first (strided).
    order = sorted(enumerate(tensor.placements), key=lambda item: isinstance(item[1], _StridedShard))
    for number, placement in order:
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise EngineError("this tensor is cut in a way that is no box", got=str(tensor.placements))
        axis, parts = placement.dim, tensor.device_mesh.size(number)
        part = -(-lengths[axis] // parts)
        low = min(part * tensor.device_mesh.get_local_rank(number), lengths[axis])
        start[axis], lengths[axis] = start[axis] + low, min(part, lengths[axis] - low)
    return ShardSpec.of(tensor.to_local(), tensor.shape, start), tensor.to_local().detach()


def gather(tensor: Tensor) -> Tensor:
    """All-gather: the full tensor on every rank, where the pieces are; a tensor that is not sharded as it is."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sharded parameters of different meshes apart, because torch computes on those of one mesh at a time."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def mirror(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Rank 0's tensors as they are; on every other rank their names and shapes, on the ``meta`` device, in one order.

    What the other ranks pass is ignored, so that they may or may not have read the same file.
    """
    if ranks.size == 1:
        return dict(tensors)
    names: Json = [[name, list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
    specs = ranks.from_first(names)
    if ranks.is_first:
        return dict(tensors)
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, shape, dtype in specs}


def _pieces(tensor: DTensor) -> int:
    *copies, cut = tensor.placements
    if not isinstance(cut, Shard) or cut.dim != 0 or any(not isinstance(p, Replicate) for p in copies):
        raise EngineError("this tensor is not cut along its first axis", got=str(tensor.placements))
    return tensor.device_mesh.size(tensor.device_mesh.ndim - 1)


def _shard_group(tensor: DTensor) -> dist.ProcessGroup:
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


def _has_first(group: dist.ProcessGroup) -> bool:
    return dist.get_global_rank(group, 0) == 0


def _padded_pieces(full: Tensor, rows: int, pieces: int) -> list[Tensor]:
    """Equal pieces; the last ones are filled up, or empty of values, where the axis does not divide."""
    missing = rows * pieces - full.shape[0]
    if missing:
        full = torch.cat([full, full.new_zeros(missing, *full.shape[1:])])
    return list(full.contiguous().chunk(pieces))
