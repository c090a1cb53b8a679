"""`ShardSpec`: which part of a weight one rank holds.

An engine exports ``(name, ShardSpec, tensor)``; whoever receives the pieces (weight sync, a checkpoint) plans from
the specs alone which bytes go where, without asking the engine. Cuts follow torch's rule: along an axis of length n cut
into k parts, each part has ceil(n / k) entries, except the last ones, which get what is left, possibly nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl.errors import EngineError

REPLICATE = -1
"""The placement of a mesh axis along which every rank holds the same part."""


@dataclass(frozen=True)
class ShardSpec:
    """A box inside a global tensor, and the mesh that cut it.

    Args:
        global_shape: shape of the whole weight.
        offsets, shape: where this rank's box starts and how large it is, per tensor axis.
        mesh_axes, mesh_shape: names and sizes of the mesh axes, outermost first; empty for an unsharded weight.
        placements: per mesh axis the tensor axis it cuts, or `REPLICATE`.
        coordinate: this rank's place in the mesh.

    Example:
        >>> ShardSpec.cut((10, 4), ("fsdp", "tp"), (2, 2), placements=(0, 1), coordinate=(1, 0))
        ... # rows 5 to 10, columns 0 to 2
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    mesh_axes: tuple[str, ...] = ()
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()

    @classmethod
    def full(cls, shape: Sequence[int]) -> ShardSpec:
        """The whole weight on this rank."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def cut(
        cls,
        global_shape: Sequence[int],
        mesh_axes: Sequence[str],
        mesh_shape: Sequence[int],
        placements: Sequence[int],
        coordinate: Sequence[int],
    ) -> ShardSpec:
        """The box of one rank; the mesh axes cut one after the other, outermost first.

        Raises:
            EngineError: the lists do not match, a tensor axis does not exist, or the coordinate lies outside the mesh.
        """
        if not len(mesh_axes) == len(mesh_shape) == len(placements) == len(coordinate):
            raise EngineError("mesh axes, sizes, placements and coordinate must have the same length", got=mesh_axes)
        offsets, shape = [0] * len(global_shape), list(global_shape)
        for name, parts, axis, index in zip(mesh_axes, mesh_shape, placements, coordinate):
            if not 0 <= index < parts or not REPLICATE <= axis < len(shape):
                raise EngineError(f"mesh axis {name!r} of size {parts} cannot place this", got=(axis, index))
            if axis == REPLICATE:
                continue
            size = -(-shape[axis] // parts)
            start = min(index * size, shape[axis])
            offsets[axis] += start
            shape[axis] = min(size, shape[axis] - start)
        return cls(
            tuple(global_shape),
            tuple(offsets),
            tuple(shape),
            tuple(mesh_axes),
            tuple(mesh_shape),
            tuple(placements),
            tuple(coordinate),
        )

    @property
    def is_full(self) -> bool:
        return self.shape == self.global_shape

    @property
    def num_elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the one of its replicas that should send or store the box."""
        return all(place != REPLICATE or at == 0 for place, at in zip(self.placements, self.coordinate))

    def slices(self) -> tuple[slice, ...]:
        """``whole[spec.slices()]`` is this rank's box."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape))

    def overlap(self, other: ShardSpec) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The common box, as slices into this rank's and into the other's local tensor; None if there is none."""
        if self.global_shape != other.global_shape:
            raise EngineError("pieces of different weights", got=(self.global_shape, other.global_shape))
        mine, theirs = [], []
        for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape):
            start, end = max(a, b), min(a + n, b + m)
            if start >= end:
                return None
            mine.append(slice(start - a, end - a))
            theirs.append(slice(start - b, end - b))
        return tuple(mine), tuple(theirs)

    def to_json(self) -> dict[str, list[Any]]:
        return {key: list(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, list[Any]]) -> ShardSpec:
        return cls(**{key: tuple(value) for key, value in data.items()})
