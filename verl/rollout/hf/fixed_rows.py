"""Linear layers in which no row depends on the others, bit for bit.

A library of matrix products chooses its kernel, the order of its sums and how threads share them by the number of rows:
with MKL on AVX-512 a row has other bits among 8 rows than among 16, and with several threads among 64 than among 512.
In products of one size every row is summed alike, whatever its place and its company.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS = 32
"""Of every product: fewer are slower for many rows, more are slower for few."""


class FixedRows(TorchFunctionMode):
    """While it is entered, ``torch.nn.functional.linear`` multiplies `ROWS` rows at a time, the last ones padded."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS))
    parts = [F.linear(part, weight, bias) for part in padded.split(ROWS)]
    made = torch.cat(parts) if len(parts) > 1 else parts[0]
    return made[: len(rows)].reshape(*input.shape[:-1], weight.shape[0])
