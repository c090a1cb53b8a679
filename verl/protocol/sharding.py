"""`ShardSpec`: which part of a tensor one rank holds.

Engines give ``name -> (ShardSpec, tensor)``. The receiver of the parts (a checkpoint, say) plans from the specs alone
who writes or sends what, and needs to know no layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """A box of a tensor: where it begins along each axis, and how long it is.

    Args:
        shape: of the complete tensor.
        dtype: as torch calls it, without ``torch.``.
        start: the first index along each axis.
        lengths: of the box along each axis.

    Example:
        >>> ShardSpec.along(rows, (10, 4), axis=0, low=5)  # rows 5 and after of ten, as many as there are in ``rows``
    """

    shape: tuple[int, ...]
    dtype: str
    start: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, shape: Sequence[int] | None = None, start: Sequence[int] | None = None) -> ShardSpec:
        """Of a box; without a shape it is the complete tensor."""
        lengths = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(shape or lengths), dtype, tuple(start or (0,) * len(lengths)), lengths)

    @classmethod
    def along(cls, tensor: Tensor, shape: Sequence[int], axis: int, low: int) -> ShardSpec:
        """Of a box that is cut along one axis, where it begins at ``low``."""
        return cls.of(tensor, shape, [low if number == axis else 0 for number in range(len(shape))])

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Begin and end along each axis."""
        return [(low, low + length) for low, length in zip(self.start, self.lengths)]

    @property
    def slices(self) -> tuple[slice, ...]:
        """``complete[spec.slices]`` is the box."""
        return tuple(slice(low, high) for low, high in self.bounds)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype of torch: {self.dtype}")
        return dtype


def make_up(boxes: Iterable[ShardSpec], shape: Sequence[int]) -> bool:
    """Whether boxes make up a tensor of this shape: each is inside, and every element is in exactly one."""
    boxes = list(boxes)
    if any(len(box.start) != len(shape) or len(box.lengths) != len(shape) for box in boxes):
        return False
    if any(not 0 <= low <= high <= size for box in boxes for (low, high), size in zip(box.bounds, shape)):
        return False
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    # As many elements as the tensor has: they make it up unless two overlap, which is looked for along the first axis.
    filled = sorted((box.bounds for box in boxes if box.numel), key=lambda bounds: bounds[:1])
    begun: list[list[tuple[int, int]]] = []
    for bounds in filled if len(filled) > 1 else []:
        begun = [other for other in begun if other[0][1] > bounds[0][0]]
        if any(all(low < end and first < high for (low, high), (first, end) in zip(bounds, other)) for other in begun):
            return False
        begun.append(bounds)
    return True
