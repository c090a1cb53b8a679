"""Which tensors, and which boxes of them, each rank of an engine writes into a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from verl.checkpoint.state import WeightFiles
from verl.distributed import Ranks
from verl.distributed.boxes import Shards, ShardTable, assign_ranks, completed
from verl.models.hf_folder import MAX_SHARD_BYTES
from verl.protocol.sharding import ShardSpec

OnDisk = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Complete tensors under their names in memory -> the same under those of the Hugging Face files."""


@dataclass(frozen=True)
class WeightsToWrite:
    """The weights that this rank writes.

    Args:
        tensors: complete, under Hugging Face names.
        files: where they go, if several ranks write.
        fresh: names of those whose memory nothing else refers to.
    """

    tensors: Mapping[str, Tensor]
    files: WeightFiles | None = None
    fresh: frozenset[str] = field(default_factory=frozenset)


def weights_to_write(
    boxes: Shards,
    ranks: Ranks,
    on_disk: OnDisk,
    groups: Callable[[Sequence[str]], list[list[str]]] | None = None,
    in_one_file: bool = False,
) -> WeightsToWrite:
    """Complete weights, of which every rank gets about as many bytes, one weight on the way at a time. Collective.

    Args:
        boxes: this rank's, under names in memory.
        groups: parts names into those that have to be complete on one rank for ``on_disk``; None: each for itself.
        in_one_file: the first rank writes all of them (an adapter).
    """
    if ranks.size == 1:
        return WeightsToWrite(on_disk({name: tensor for name, (_, tensor) in boxes.items()}))
    table = ShardTable.of(boxes, ranks)
    names = list(table.holders)
    if in_one_file:
        owners, parts = dict.fromkeys(names, 0), [names]
    else:
        parts = [[name] for name in names] if groups is None else groups(names)
        owners = assign_ranks(parts, table, ranks.size)
    received = dict(completed(boxes, table, owners, ranks))
    weights: dict[str, Tensor] = {}
    for part in parts if groups is not None or in_one_file else ([*received],):
        ready = {name: received.pop(name) for name in part if name in received}
        if ready:
            weights |= on_disk(ready)
    live = {tensor.untyped_storage().data_ptr() for _, tensor in boxes.values()}
    fresh = frozenset(name for name, tensor in weights.items() if tensor.untyped_storage().data_ptr() not in live)
    if in_one_file:
        return WeightsToWrite(weights, fresh=fresh)
    sizes = ranks.exchange([[name, tensor.nbytes] for name, tensor in weights.items()])
    return WeightsToWrite(weights, WeightFiles.of(sizes, MAX_SHARD_BYTES), fresh)


def held(boxes: Mapping[str, tuple[ShardSpec, Tensor]]) -> dict[str, tuple[ShardSpec, Tensor]]:
    """Without boxes of no elements: what a rank has of an axis that is shorter than the number of ranks."""
    return {name: box for name, box in boxes.items() if box[0].numel or not math.prod(box[0].shape)}
