"""What dumps and validation record of conversations besides text: turns, tool calls, rewards, masks."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto

RECORD = "trajectory"
"""Column that loops with several turns write: one entry per piece of the conversation."""
COLUMNS = ("tool_call_counts", "tool_rewards", "turn_scores", "reward_scores", "ended")


def conversation_columns(batch: DataProto) -> dict[str, list[Any]]:
    """Columns for a dump, one entry per row; nothing for a batch of single turns.

    ``mask_runs`` is the response mask as [value, number of tokens] one after the other: 1 is trained on, 0 is what
    tools and users said (or all of a row that was masked out).
    """
    batch_columns = batch.non_tensor_batch
    if RECORD not in batch_columns:
        return {}
    columns = {name: list(batch_columns[name]) for name in COLUMNS if name in batch_columns}
    columns["num_turns"] = list(batch_columns["__num_turns__"])
    there = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :].bool()
    columns["mask_runs"] = [runs(mask[kept]) for mask, kept in zip(batch.tensors["response_mask"], there)]
    columns[RECORD] = list(batch_columns[RECORD])
    return columns


def turns_of(record: list[dict[str, Any]] | None) -> list[tuple[str, str]]:
    """(role, text) of the pieces of one row's conversation after its prompt; empty where only the policy speaks."""
    first = next((i for i, entry in enumerate(record or ()) if entry["role"] == "assistant"), 0)
    turns = [(str(entry["role"]), _text(entry)) for entry in (record or ())[first:]]
    return turns if len(turns) > 1 else []


def turns_of_rows(columns: dict[str, list[Any]], count: int) -> list[list[tuple[str, str]]]:
    """`turns_of` each of ``count`` rows."""
    return [turns_of(record) for record in columns.get(RECORD, [None] * count)]


def _text(entry: dict[str, Any]) -> str:
    calls = [f"{call['name']}: {call['answer']}" for call in entry.get("calls", ())]
    return "\n".join(calls) or str(entry.get("text", ""))


def add_columns(columns: dict[str, list[Any]], new: dict[str, list[Any]], before: int, count: int) -> None:
    """Append the columns of ``count`` more rows to those of ``before`` rows; what a side does not have is None."""
    for name in {*columns, *new}:
        column = columns.setdefault(name, [None] * before)
        column += new.get(name, [None] * count)


def runs(mask: torch.Tensor) -> list[list[int]]:
    """A mask (T,) as [value, length] of each stretch of equal values."""
    return [[int(value), len(list(same))] for value, same in groupby(mask.tolist())]


def spread(name: str, values: list[Any]) -> dict[str, float]:
    """``<name>/min``, ``/max`` and ``/mean`` of the values that are there; nothing if there is none."""
    numbers = np.array([value for value in values if value is not None], dtype=float)
    if not len(numbers):
        return {}
    return {f"{name}/{k}": float(f(numbers)) for k, f in (("min", np.min), ("max", np.max), ("mean", np.mean))}
