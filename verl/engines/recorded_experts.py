"""Recorded experts of a batch in an engine: what fits its model, and the column that a recording pass makes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from verl.errors import DataError
from verl.models.router_replay import COLUMN, NO_RECORD
from verl.protocol import DataProto


class Routing(Protocol):
    """What a forward pass replays with, whichever layers it has."""

    @property
    def facts(self) -> list[tuple[int, int]]:
        """Of each layer with experts, on any rank: how many there are, and how many a token gets."""
        ...


def check_experts(experts: Tensor | None, routing: Routing) -> None:
    """Refuse experts that another model chose.

    Args:
        experts: (rows, tokens, layers, top_k), or None where nothing is replayed.

    Raises:
        DataError: other layers, another number of experts per token, or experts that there are not.
    """
    if experts is None:
        return
    kinds = sorted(set(routing.facts))
    shape = (len(routing.facts), kinds[0][1])
    if len(kinds) > 1 or tuple(experts.shape[2:]) != shape:
        raise DataError(
            "the recorded experts are not those of this model",
            key=COLUMN,
            got=f"(rows, tokens, {', '.join(map(str, experts.shape[2:]))})",
            allowed=f"(rows, tokens, {shape[0]}, {shape[1]}): layers with experts, experts per token",
            fix="Do sampler and trainer hold the same model?",
        )
    count = kinds[0][0]
    if experts.numel() and not NO_RECORD <= int(experts.min()) <= int(experts.max()) < count:
        wrong = [int(x) for x in (experts.min(), experts.max()) if not NO_RECORD <= int(x) < count]
        raise DataError(
            "a recorded expert is none of this model's", key=COLUMN, got=wrong[0], allowed=f"0 to {count - 1}"
        )


def local_experts(experts: Tensor, together: DataProto, batch: DataProto, mine: slice) -> Tensor:
    """A rank's part of a column that was made for the rows of several.

    Args:
        experts: (rows of all, their P+T, layers, top_k).
        together: the rows of all; prompts are padded on the left, to the longest of any.
        batch: the rank's own.
        mine: where its rows lie.
    """
    (_, width), (_, responses) = batch.tensors["input_ids"].shape, batch.tensors["responses"].shape
    first = experts.shape[1] - together.tensors["responses"].shape[1] - (width - responses)
    return experts[mine, first : first + width]


class RecordedExperts:
    """Gathers the experts that passes over a batch chose, as its column ``routed_experts``.

    Args:
        batch: with ``attention_mask`` (B, P+T).
    """

    def __init__(self, batch: DataProto):
        tensors: Any = batch.batch
        self._attended = tensors["attention_mask"].cpu().bool()
        self._column: Tensor | None = None

    def add(self, index: Tensor, recorded: Tensor | None) -> None:
        """Of the rows ``index``: (b, l, layers, top_k), each row's tokens from its first one on."""
        if recorded is None:
            return
        if self._column is None:
            self._column = torch.full((*self._attended.shape, *recorded.shape[2:]), NO_RECORD, dtype=torch.int16)
        recorded = recorded.cpu()
        for row, experts in zip(index.tolist(), recorded):
            columns = self._attended[row].nonzero().flatten()[: len(experts)]
            have = self._column[row, columns]
            self._column[row, columns] = torch.maximum(have, experts[: len(columns)])  # a stage knows its own layers

    def column(self) -> Tensor:
        """(B, P+T, layers, top_k) int16, `NO_RECORD` on padding and on tokens that no pass needed."""
        assert self._column is not None, "every rank has at least one pass, if only a filler"
        return self._column
