"""Lists of rows to batches: for prompts a dict of columns, for supervised rows tensors padded to the longest row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import DataError


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns of a batch of rows: tensors of one shape are stacked, all else becomes an object array of length B.

    Raises:
        DataError: rows with different columns, or tensors of one column with different shapes.
    """
    columns = data_list[0].keys()
    for row in data_list:
        if row.keys() != columns:
            differing = sorted(set(row) ^ set(columns))
            raise DataError(f"rows of one batch have different columns: {', '.join(differing)}")
    return {name: _column(name, [row[name] for row in data_list]) for name in columns}


def sft_collate(rows: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Rows of 1-D tensors, padded on the right to the longest: ``input_ids`` with ``pad_token_id``, the rest with 0.

    Returns:
        Tensors (B, L) under the names of the rows; what is no tensor (the images of a row) as object arrays (B,).
    """
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, Any] = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, torch.Tensor):
            fill, pad = pad_token_id if name == "input_ids" else 0, torch.nn.functional.pad
            batch[name] = torch.stack([pad(value, (0, longest - len(value)), value=fill) for value in values])
        else:
            batch[name] = _column(name, values)
    return batch


def _column(name: str, values: list[Any]) -> torch.Tensor | np.ndarray:
    if all(isinstance(value, torch.Tensor) for value in values):
        if len({value.shape for value in values}) > 1:
            shapes = sorted({str(tuple(value.shape)) for value in values})
            raise DataError(f"tensors of column {name!r} have different shapes: {', '.join(shapes)}")
        return torch.stack(values)
    column = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # one by one: numpy would make lists of one length a second axis
        column[i] = value
    return column
