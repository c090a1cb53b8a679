"""Slices of packed rows over the ranks that share them, under the path and names that users' code imports."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.distributed.slices import gather_and_unpad, pad_and_slice
from verl.distributed.slices import sequence_group_size as get_ulysses_sequence_parallel_world_size
from verl.distributed.slices import set_sequence_group as set_ulysses_sequence_parallel_group

__all__ = [
    "gather_outputs_and_unpad",
    "get_ulysses_sequence_parallel_world_size",
    "set_ulysses_sequence_parallel_group",
    "ulysses_pad_and_slice_inputs",
]


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: int = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """Token ids (1, N) and position ids (..., N) padded and cut: this rank's slices, and the tokens that were added.

    ``skip_position_ids_rmpad`` leaves the position ids whole.
    """
    return pad_and_slice(input_ids_rmpad, position_ids_rmpad, sp_size, not skip_position_ids_rmpad, pad_value)


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: Any = None,
) -> Tensor:
    """The whole of what every rank has a slice of, without the padding; ``x`` itself where nobody shares."""
    return gather_and_unpad(x, gather_dim, unpad_dim, padding_size, grad_scaler, group)
