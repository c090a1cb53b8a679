"""Run a model's head only where its output is used.

A vocabulary of 150,000 makes the language-model head the largest matrix product of a small model, and the logits its
largest tensor; prompt and padding positions need neither. Selecting in front of the head leaves everything that a
family does behind it (scaling, soft-capping) to the family's own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.errors import ModelError
from verl.models.loading import value_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def output_head(model: PreTrainedModel, kind: str) -> nn.Module:
    """The last linear layer of a model: the language-model head, or the scalar head of a value model."""
    if kind == "value":
        return value_head(model)
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    return head


@contextlib.contextmanager
def select_positions(head: nn.Module, flat_index: torch.Tensor) -> Iterator[None]:
    """Within the block ``head`` sees only some positions: (b, L, H) becomes (1, N, H).

    Args:
        flat_index: (N,) int64 into the flattened (b·L) positions.
    """

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = inputs[0]
        return (hidden.flatten(0, -2).index_select(0, flat_index).unsqueeze(0), *inputs[1:])

    handle = head.register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
