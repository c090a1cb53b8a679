"""Memory for keys and values: blocks of rows that attend together, over reused buffers.

A block holds *groups* of up to ``width`` rows. All rows of a group share one prompt, stored once in the block's prefix
part; what a row generated is in its own part. A group of width 1 without a prefix part is an ordinary row. Both
parts are contiguous, so that attention is one batched matrix product per part (on CPU several times faster than fused
attention kernels with one query token, or than strided slices of a longer cache).

Shapes: L layers, F groups, h KV heads, n width, P prefix capacity, S own capacity, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl.rollout.hf.rows import Row

GROWTH, GROWTH_OF_SCARCE = 2.0, 1.25
"""A block that runs out of groups is made that many times larger; the second where memory is scarce."""


@dataclass(frozen=True)
class KVShape:
    """What one token costs: layers, heads and dimensions, the same in every layer."""

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def memory_is_scarce(device: torch.device) -> bool:
    """On accelerators; an allocation costs little there."""
    return device.type != "cpu"


class BufferPool:
    """Flat buffers by size; a buffer that is given back serves the next block of similar size.

    On CPU a fresh page costs many times its copy, so reuse is what makes growing blocks cheap. Elsewhere memory is
    scarce and torch has a pool of its own: what does not fit the next block is freed, or every smaller version of a
    block that grows would stay. Buffers hold finite numbers at all times, because attention multiplies unused cells by
    an exact zero.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.is_scarce = dtype, device, memory_is_scarce(device)
        self._free: list[torch.Tensor] = []
        self._num_taken = 0

    @property
    def num_bytes(self) -> int:
        """Memory held, in use or free."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return (self._num_taken + sum(b.numel() for b in self._free)) * size

    def take(self, numel: int) -> torch.Tensor:
        """A 1-D buffer of at least ``numel`` and at most about twice as many elements."""
        fitting = [b for b in self._free if numel <= b.numel() <= 2 * numel + 4096]
        if fitting:
            best = min(fitting, key=lambda b: b.numel())
            self._free = [b for b in self._free if b is not best]
        else:
            if self.is_scarce:
                self.clear()
            best = torch.zeros(numel, dtype=self.dtype, device=self.device)
        self._num_taken += best.numel()
        return best

    def give(self, buffer: torch.Tensor) -> None:
        self._num_taken -= buffer.numel()
        self._free.append(buffer)

    def clear(self) -> None:
        """Free what is not in use."""
        self._free = []


@dataclass(eq=False)
class Group:
    """Rows of one prompt in a block; ``prefix_len`` tokens of it are in the block's prefix part."""

    rows: list[Row | None]
    prefix_len: int

    @property
    def num_alive(self) -> int:
        return sum(row is not None for row in self.rows)

    @property
    def longest(self) -> int:
        """Most cached tokens in any row's own part."""
        return max((row.num_cached for row in self.rows if row is not None), default=self.prefix_len) - self.prefix_len


@dataclass(eq=False)
class Cell:
    """Where a row is."""

    block: KVBlock
    group: Group
    slot: int


class KVBlock:
    """Groups of one width and one pair of capacities, dense from 0 to ``len(groups)``.

    Attributes:
        keys, values: (L, F, h, n, S, d); prefix_keys, prefix_values: (L, F, h, P, d), None where P is 0.
        changed: set when rows came or went since the last `compact`.
    """

    def __init__(self, shape: KVShape, pool: BufferPool, width: int, prefix_capacity: int, capacity: int):
        self.shape, self.pool = shape, pool
        self.width, self.prefix_capacity, self.capacity = width, prefix_capacity, capacity
        self.groups: list[Group] = []
        self.room = 0
        self.changed = True
        self._buffers: list[torch.Tensor] = []
        self.keys = self.values = torch.empty(0)
        self.prefix_keys: torch.Tensor | None = None
        self.prefix_values: torch.Tensor | None = None

    @property
    def num_alive(self) -> int:
        return sum(group.num_alive for group in self.groups)

    def reserve(self, extra: int) -> None:
        """Make room for ``extra`` more groups."""
        needed = len(self.groups) + extra
        if needed <= self.room:
            return
        old, old_buffers, filled = self.parts(), self._buffers, len(self.groups)
        growth = GROWTH_OF_SCARCE if self.pool.is_scarce else GROWTH
        self._allocate(needed if not self.room else max(needed, int(growth * self.room)))
        for source, target in zip(old, self.parts()):
            target[:, :filled] = source[:, :filled]
        for buffer in old_buffers:
            self.pool.give(buffer)

    def append(self, group: Group) -> int:
        """Add a group whose keys and values the caller then writes; returns its index."""
        self.groups.append(group)
        for slot, row in enumerate(group.rows):
            if row is not None:
                row.cell = Cell(self, group, slot)
        self.changed = True
        return len(self.groups) - 1

    def compact(self) -> None:
        """Close the holes that ended groups left, by moving groups from the end into them."""
        alive = [i for i, group in enumerate(self.groups) if group.num_alive]
        count = len(alive)
        holes = sorted(set(range(count)) - set(alive))
        movers = [i for i in alive if i >= count]
        if holes:
            to, from_ = (torch.tensor(x, device=self.shape.device) for x in (holes, movers))
            for part in self.parts():
                part[:, to] = part[:, from_]
            for hole, mover in zip(holes, movers):
                self.groups[hole] = self.groups[mover]
        del self.groups[count:]

    def free(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            self.pool.give(buffer)
        self._buffers, self.room, self.groups = [], 0, []
        self.keys = self.values = torch.empty(0)  # views of the buffers, and so memory that the pool may free
        self.prefix_keys = self.prefix_values = None

    def parts(self) -> list[torch.Tensor]:
        """Keys, values and, where there is a prefix part, its keys and values."""
        if not self.room:
            return []
        parts = [self.keys, self.values]
        if self.prefix_keys is not None and self.prefix_values is not None:
            parts += [self.prefix_keys, self.prefix_values]
        return parts

    def _allocate(self, room: int) -> None:
        s = self.shape
        suffix = (s.num_layers, room, s.num_heads, self.width, self.capacity)
        prefix = (s.num_layers, room, s.num_heads, self.prefix_capacity)
        self._buffers, self.room = [], room
        self.keys = self._carve((*suffix, s.key_dim))
        self.values = self._carve((*suffix, s.value_dim))
        if self.prefix_capacity:
            self.prefix_keys = self._carve((*prefix, s.key_dim))
            self.prefix_values = self._carve((*prefix, s.value_dim))

    def _carve(self, shape: tuple[int, ...]) -> torch.Tensor:
        numel = 1
        for size in shape:
            numel *= size
        buffer = self.pool.take(numel)
        self._buffers.append(buffer)
        return buffer[:numel].view(shape)


def move_groups(source: KVBlock, target: KVBlock, indices: Sequence[int]) -> None:
    """Append whole groups of ``source`` to ``target``, which has the same width and at least the same capacities."""
    first, count = len(target.groups), len(indices)
    target.reserve(count)
    is_slice = list(indices) == list(range(count))
    # A slice copies straight between the two; an index makes a copy in between.
    selection = slice(0, count) if is_slice else torch.tensor(indices, device=source.shape.device)
    for old, new in zip(source.parts(), target.parts()):
        new[:, first : first + count, ..., : old.shape[-2], :] = old[:, selection]
    for index in indices:
        group = source.groups[index]
        target.append(group)
        source.groups[index] = Group([None] * source.width, 0)
    source.changed = True


def regroup(source: KVBlock, target: KVBlock, picks: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Append groups to ``target`` that are made of some rows of the groups of ``source``.

    Args:
        picks: per new group the index of its group in ``source`` and the slots it takes from it, at most
            ``target.width``.
    """
    first, count = len(target.groups), len(picks)
    target.reserve(count)
    heads, width, device = source.shape.num_heads, target.width, source.shape.device
    group_of = torch.tensor([group for group, _ in picks])
    # A slot that stays empty copies its group's first one: finite numbers that no row reads.
    slot_of = torch.tensor([[*slots, *([slots[0]] * (width - len(slots)))] for _, slots in picks])
    head = torch.arange(heads)[:, None]
    cells = ((group_of[:, None, None] * heads + head) * source.width + slot_of[:, None, :]).flatten().to(device)
    suffixes = [(source.keys, target.keys), (source.values, target.values)]
    for old, new in suffixes:
        for layer in range(source.shape.num_layers):  # a copy of all layers would be as large as the target
            moved = old[layer].flatten(0, 2).index_select(0, cells).unflatten(0, (count, heads, width))
            new[layer, first : first + count, ..., : source.capacity, :] = moved
    for old, new in zip(source.parts()[len(suffixes) :], target.parts()[len(suffixes) :]):
        new[:, first : first + count, ..., : source.prefix_capacity, :] = old[:, group_of.to(device)]
    for index, slots in picks:
        group = source.groups[index]
        rows = [group.rows[slot] for slot in slots]
        for slot in slots:
            group.rows[slot] = None
        target.append(Group([*rows, *([None] * (width - len(rows)))], group.prefix_len))
    source.changed = True


def capacity_class(tokens: int) -> int:
    """The next capacity up: multiples of 16 to 128, then four steps per doubling."""
    step = 16
    while tokens > 8 * step:
        step *= 2
    return -(-tokens // step) * step
