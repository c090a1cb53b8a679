"""Making a batch divisible and back, and folding its rows into groups."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDict

from verl.errors import BatchError
from verl.protocol.batch import DataProto, DataProtoItem
from verl.protocol.columns import divisors, object_array


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with rows repeated from its start until it divides by ``size_divisor``, and how many were added."""
    if size_divisor < 1:
        raise BatchError("the divisor must be at least 1", got=size_divisor)
    pad_size = -len(data) % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(torch.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last ``pad_size`` rows."""
    return data[:-pad_size] if pad_size else data


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Rows -> batch: tensors are stacked, the rest becomes object arrays."""
    if not x:
        raise BatchError("there is no row to make a batch from")
    tensors = [item.batch for item in x if item.batch is not None]
    if tensors and len(tensors) != len(x):
        raise BatchError("rows with and without tensors cannot be collated")
    keys = x[0].non_tensor_batch.keys()
    if any(item.non_tensor_batch.keys() != keys for item in x):
        raise BatchError("the rows have different non-tensor columns", allowed=sorted(keys))
    return DataProto(
        batch=cast(TensorDict, torch.stack(cast(Any, tensors))).contiguous() if tensors else None,
        non_tensor_batch={key: object_array([item.non_tensor_batch[key] for item in x]) for key in keys},
    )


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Group rows: every column (B, ...) becomes (new_batch_size, B / new_batch_size, ...), as views."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise BatchError(
            f"{rows} rows do not fold into {new_batch_size} groups", allowed=divisors(rows, max(new_batch_size, 1))
        )
    group = rows // new_batch_size

    def fold(values: Any) -> Any:
        return values.reshape(new_batch_size, group, *values.shape[1:])

    return _reshaped(data, fold, new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The reverse of `fold_batch_dim`: the first ``batch_dims`` axes of every column become the rows."""
    shapes = [tuple(column.shape[:batch_dims]) for column in data.non_tensor_batch.values()]
    shapes += [tuple(value.shape[:batch_dims]) for value in data.batch.values()] if data.batch is not None else []
    if len(set(shapes)) > 1 or any(len(shape) < batch_dims for shape in shapes):
        raise BatchError(f"the columns do not share their first {batch_dims} axes", got=shapes)
    rows = 1
    for size in shapes[0] if shapes else (0,):
        rows *= size

    def unfold(values: Any) -> Any:
        return values.reshape(rows, *values.shape[batch_dims:])

    return _reshaped(data, unfold, rows)


def _reshaped(data: DataProto, change: Any, rows: int) -> DataProto:
    batch = None
    if data.batch is not None:
        batch = TensorDict(
            {key: change(value) for key, value in data.batch.items()}, batch_size=[rows], device=data.batch.device
        )
    columns = {key: change(column) for key, column in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)
