"""Rows without their padding, under upstream's path."""

from typing import Any

from torch import Tensor

from verl.compat.forms.sequences import index_first_axis, pad_input, unpad_input
from verl.errors import MissingDependencyError


def rearrange(tensor: Tensor, pattern: str, **axes_lengths: int) -> Tensor:
    """As einops' function of that name, from whose package it is."""
    try:
        import einops
    except ImportError as error:
        raise MissingDependencyError("the package einops is not installed", fix="pip install einops") from error
    return einops.rearrange(tensor, pattern, **axes_lengths)
