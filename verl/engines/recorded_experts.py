"""Recorded experts of a batch in an engine: what fits its model, and the column that a recording pass makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.errors import DataError
from verl.models.router_replay import COLUMN, NO_RECORD, RouterReplay
from verl.protocol import DataProto


def check_experts(experts: Tensor | None, routing: RouterReplay) -> None:
    """Refuse experts that another model chose.

    Args:
        experts: (rows, tokens, layers, top_k), or None where nothing is replayed.

    Raises:
        DataError: other layers, another number of experts per token, or experts that there are not.
    """
    if experts is None:
        return
    layers = len(routing.routers)
    kinds = sorted({(facts(router)) for router in routing.routers})
    shape = (layers, kinds[0][1])
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


def facts(router: Any) -> tuple[int, int]:
    """Of a router: how many experts there are, and how many a token gets."""
    return int(router.num_experts), int(router.top_k)


class RecordedExperts:
    """Gathers the experts that passes over a batch chose, as its column ``routed_experts``.

    Args:
        batch: with ``attention_mask`` (B, P+T).
    """

    def __init__(self, batch: DataProto):
        tensors: Any = batch.batch
        self._attended = tensors["attention_mask"].cpu().bool()
        self._column: Tensor | None = None

    def add(self, index: Tensor, chosen: Tensor | None) -> None:
        """Of the rows ``index``: (b, l, layers, top_k), each row's tokens from its first one on."""
        if chosen is None:
            return
        if self._column is None:
            self._column = torch.full((*self._attended.shape, *chosen.shape[2:]), NO_RECORD, dtype=torch.int16)
        chosen = chosen.cpu()
        for row, experts in zip(index.tolist(), chosen):
            columns = self._attended[row].nonzero().flatten()[: len(experts)]
            self._column[row, columns] = experts[: len(columns)]

    def column(self) -> Tensor:
        """(B, P+T, layers, top_k) int16, `NO_RECORD` on padding and on tokens that no pass needed."""
        assert self._column is not None, "every rank has at least one pass, if only a filler"
        return self._column
