"""Working through big tensors a few rows at a time, so that what is computed in between stays in the processor's cache.

On a CPU a chain of element-wise operations over a whole batch is bound by memory: every operation reads and writes all
of it. In blocks, each input comes from memory once. Other devices have the bandwidth and pay for every launch, so
there the whole batch is one block. No result depends on the blocks beyond rounding. Shapes: B rows, T columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.masked import zero_outside

BLOCK_ELEMENTS = 1 << 17  # half a megabyte in float32: large beside the cost of a call, small beside the last cache


def row_blocks(like: Tensor) -> Iterator[slice]:
    """Slices over the rows of a (B, T) tensor; one slice unless it is on the CPU."""
    rows, width = like.shape[0], like.shape[1]
    size = max(1, BLOCK_ELEMENTS // max(1, width)) if like.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class Scratch:
    """Tensors of one block's shape that every block gets again, so that intermediate results stay in the cache.

    Fresh memory for each of them would come out of the cache less often, and from the system where it is large.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self._tensors, self._taken, self._shape = list[Tensor](), 0, (0, 0)

    def begin(self, rows: int, width: int) -> None:
        """A block of this shape, at most as large as the first one, starts: all tensors are free again."""
        self._taken, self._shape = 0, (rows, width)

    def take(self) -> Tensor:
        """(rows, width), uninitialised."""
        if self._taken == len(self._tensors):
            self._tensors.append(torch.empty(self._shape, dtype=self.dtype, device=self.device))
        self._taken += 1
        return self._tensors[self._taken - 1][: self._shape[0]]


def float_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of 0 and 1 as numbers that can be multiplied."""
    return mask.to(dtype)


def cleaned(values: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """``values`` where the mask is 1, else 0, whatever stands there; as `zero_outside`, and faster on a CPU.

    Args:
        mask: 0 or 1, of the dtype of ``values``.
        out: memory that may be used for the result.
    """
    if values.device.type != "cpu":
        return zero_outside(values, mask)
    product = torch.mul(values, mask, out=out)
    if math.isfinite(product.sum().item()):
        return product
    return zero_outside(values, mask)  # NaN times 0 is NaN: some padding, or a valid value, is not finite


def inner_product(values: Tensor, factors: Tensor, mask: Tensor) -> Tensor:
    """The sum of ``values * factors``, whatever stands in ``values`` where the mask is 0; mask as in `cleaned`.

    Args:
        factors: 0 outside the mask.
    """
    total = torch.dot(values.flatten(), factors.flatten())
    if values.device.type == "cpu" and math.isfinite(total.item()):
        return total
    return torch.dot(zero_outside(values, mask).flatten(), factors.flatten())


def extremes(values: Tensor) -> tuple[float, float]:
    """The least and the greatest value, NaN if there is one; 0 and 0 of nothing."""
    if values.numel() == 0:
        return 0.0, 0.0
    if values.device.type == "cpu":  # numpy's loops over contiguous numbers are twice as fast
        array = values.numpy()
        return array.min().item(), array.max().item()
    lowest, highest = torch.stack(torch.aminmax(values)).tolist()
    return lowest, highest


def comparable(values: Tensor) -> Any:
    """The same numbers in the same memory as something that compares fast: on a CPU numpy does, five times as fast."""
    return values.numpy() if values.device.type == "cpu" else values


def positions(condition: Any) -> Tensor:
    """The flat positions, ascending, where a comparison of `comparable` values holds."""
    if isinstance(condition, Tensor):
        return condition.flatten().nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(condition))


def log_(values: Tensor) -> Tensor:
    """The natural logarithm in place; in float32 on a CPU by numpy, whose loop is three times as fast."""
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return values.log_()
    with np.errstate(divide="ignore", invalid="ignore"):
        np.log(values.numpy(), out=values.numpy())
    return values
