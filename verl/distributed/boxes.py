"""Tensors of which every rank holds a box: holders, writers, and a gather of one complete tensor at a time.

A box is a begin and a length along each axis. Engines cut along rows (FSDP2), rows or columns (tensor parallelism),
experts and layers, and hold some tensors several times; here all of that is one table, so saving needs to know no
layout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from verl.distributed.ranks import Ranks
from verl.errors import EngineError
from verl.json_text import Json
from verl.protocol.sharding import ShardSpec, make_up

SENT_AHEAD = 4
"""Boxes that a rank may have on their way before it waits for the first of them."""


Shards = Mapping[str, tuple[ShardSpec, Tensor]]
"""Name -> this rank's box of it, which may share the memory of what it was taken from."""


class ShardTable:
    """The boxes of all ranks; the same on each of them.

    Args:
        holders: name -> box -> the ranks that hold it.

    Raises:
        EngineError: the boxes of a tensor do not make it up, or ranks disagree about its shape.
    """

    def __init__(self, holders: dict[str, dict[ShardSpec, list[int]]]):
        self.holders = holders
        for name, boxes in holders.items():
            first = next(iter(boxes))
            if any((box.shape, box.dtype) != (first.shape, first.dtype) for box in boxes):
                raise EngineError(f"the ranks disagree about the shape of {name}")
            if not make_up(boxes, first.shape):
                raise EngineError(f"the parts of {name} on all ranks do not make it up", got=str(first.shape))

    @classmethod
    def of(cls, shards: Shards, ranks: Ranks) -> ShardTable:
        """Collective."""
        local: Json = [[name, spec.dtype, spec.shape, spec.start, spec.lengths] for name, (spec, _) in shards.items()]
        holders: dict[str, dict[ShardSpec, list[int]]] = {}
        for rank, answer in enumerate(ranks.exchange(local)):
            for name, dtype, *numbers in answer:
                shape, start, lengths = map(tuple, numbers)
                holders.setdefault(name, {}).setdefault(ShardSpec(shape, dtype, start, lengths), []).append(rank)
        return cls(holders)

    def num_bytes(self, name: str) -> int:
        """Of the complete tensor."""
        return sum(box.num_bytes for box in self.holders[name])

    def writers(self) -> dict[tuple[str, ShardSpec], int]:
        """Who of those that hold a box writes it: the one that has least to write."""
        boxes = [(name, box, ranks) for name, held in self.holders.items() for box, ranks in held.items()]
        load: dict[int, int] = {}
        writer_of: dict[tuple[str, ShardSpec], int] = {}
        # By name, too: equal states make equal files, whatever the order in which an optimizer made them.
        for name, box, ranks in sorted(boxes, key=lambda box: (len(box[2]) > 1, -box[1].num_bytes, box[0])):
            writer_of[name, box] = rank = min(ranks, key=lambda rank: load.get(rank, 0))
            load[rank] = load.get(rank, 0) + box.num_bytes
        return writer_of


def written_once(shards: Shards, ranks: Ranks) -> dict[str, tuple[ShardSpec, Tensor]]:
    """Of this rank's boxes those that it writes: one that several ranks hold alike is written by one of them.

    Collective.
    """
    if ranks.size == 1:
        return dict(shards)
    writers = ShardTable.of(shards, ranks).writers()
    return {name: (spec, tensor) for name, (spec, tensor) in shards.items() if writers[name, spec] == ranks.rank}


def assign_ranks(groups: Sequence[Sequence[str]], table: ShardTable, size: int) -> dict[str, int]:
    """Name -> the rank that gets the complete tensor: groups stay together, and all ranks get about as many bytes."""
    load, owners = [0] * size, {}
    sizes = [sum(table.num_bytes(name) for name in group) for group in groups]
    for number in sorted(range(len(groups)), key=lambda number: -sizes[number]):
        rank = min(range(size), key=load.__getitem__)
        load[rank] += sizes[number]
        owners.update(dict.fromkeys(groups[number], rank))
    return owners


def completed(
    shards: Shards, table: ShardTable, owners: Mapping[str, int], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of which this rank is the owner, complete and on the host. Collective.

    A tensor that a rank has alone is its own memory; every other one is new. Nothing else than these is ever complete
    on a rank, and no more than `SENT_AHEAD` boxes wait on the way.
    """
    on_the_way: deque[tuple[object, Tensor]] = deque()
    # Point to point: every rank visits the tensors in the table's order, or ranks would deadlock.
    for name, boxes in table.holders.items():
        owner = owners[name]
        if owner == ranks.rank:
            yield name, _received(name, boxes, shards, ranks)
            continue
        for holders in boxes.values():
            if owner not in holders and holders[0] == ranks.rank:
                data = shards[name][1].detach().cpu().contiguous()
                on_the_way.append((ranks.send(data, owner), data))
        while len(on_the_way) > SENT_AHEAD:
            on_the_way.popleft()[0].wait()  # type: ignore[attr-defined]
    while on_the_way:
        on_the_way.popleft()[0].wait()  # type: ignore[attr-defined]


def _received(name: str, boxes: Mapping[ShardSpec, list[int]], shards: Shards, ranks: Ranks) -> Tensor:
    first = next(iter(boxes))
    if first.lengths == first.shape and ranks.rank in boxes[first]:
        return shards[name][1].detach().cpu()
    target = torch.empty(first.shape, dtype=first.torch_dtype)
    for spec, holders in boxes.items():
        place = target[spec.slices]
        if ranks.rank in holders:
            place.copy_(shards[name][1].detach())
        elif place.is_contiguous():
            ranks.receive(place, holders[0])
        else:
            box = torch.empty(spec.lengths, dtype=target.dtype)
            ranks.receive(box, holders[0])
            place.copy_(box)
    return target
