"""Small operations on the columns of a batch that know nothing about `DataProto`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.errors import BatchError
from verl.protocol.equality import arrays_equal, deep_equal, tensors_equal

Rows = slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


def object_array(values: Sequence[Any]) -> np.ndarray:
    """One object per row; equally long lists stay lists instead of becoming a second axis."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def as_column(key: str, values: object) -> np.ndarray:
    """A non-tensor column from an array, a list or a tuple."""
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise BatchError(f"the non-tensor column {key!r} is a single value, it needs one per row", got=values)
        return values
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise BatchError(
            f"the non-tensor column {key!r} needs one value per row", got=type(values).__name__, allowed="array, list"
        )
    return object_array(list(values))


def as_index(rows: Rows, num_rows: int) -> torch.Tensor:
    """Row numbers (int64) from a list, array or tensor of indices or of booleans."""
    index = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(np.atleast_1d(np.asarray(rows)).copy())
    if index.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if index.dtype == torch.bool:
        if index.shape != (num_rows,):
            raise BatchError("a boolean mask must have one entry per row", got=tuple(index.shape), allowed=(num_rows,))
        return index.nonzero().flatten().cpu()
    if index.is_floating_point() or index.dim() != 1:
        raise BatchError("rows are chosen by a list of integers or booleans", got=rows)
    index = index.to("cpu", torch.int64)
    if int(index.min()) < -num_rows or int(index.max()) >= num_rows:
        raise IndexError(f"row {int(index.max() if index.max() >= num_rows else index.min())} of {num_rows} rows")
    return torch.where(index < 0, index + num_rows, index)


def names(keys: str | Iterable[str] | None) -> list[str]:
    """One name, several or None -> a list."""
    if keys is None:
        return []
    return [keys] if isinstance(keys, str) else list(keys)


def even_bounds(num_rows: int, parts: int) -> list[tuple[int, int]]:
    """Cuts into ``parts`` pieces whose sizes differ by at most one, the longer ones first."""
    size, longer = divmod(num_rows, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return list(itertools.pairwise(starts))


def divisors(number: int, near: int, limit: int = 8) -> list[int]:
    """The divisors of ``number`` that lie nearest to ``near``, ascending: sizes that would have worked."""
    numbers = {d for i in range(1, int(number**0.5) + 1) if number % i == 0 for d in (i, number // i)}
    return sorted(sorted(numbers, key=lambda d: (abs(d - near), d))[:limit])


def union_tensor_dict(tensor_dict1: TensorDictBase, tensor_dict2: TensorDictBase) -> TensorDictBase:
    """Put the columns of the second into the first, in place; a shared column must be equal (NaN equals NaN)."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            "two batches of different sizes have no union",
            got=(tuple(tensor_dict1.batch_size), tuple(tensor_dict2.batch_size)),
        )
    present = dict(tensor_dict1.items())
    for key, value in tensor_dict2.items():
        if key in present and not _columns_equal(present[key], value):
            raise BatchError(_conflict(key), fix=_CONFLICT_FIX)
    for key, value in tensor_dict2.items():
        if key not in present:
            tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `union_tensor_dict`, for non-tensor columns; objects are compared deeply."""
    for key, value in tensor_dict2.items():
        if key in tensor_dict1 and not arrays_equal(tensor_dict1[key], value):
            raise BatchError(_conflict(key), fix=_CONFLICT_FIX)
    tensor_dict1.update({key: value for key, value in tensor_dict2.items() if key not in tensor_dict1})
    return tensor_dict1


def union_meta_info(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in second.items():
        if key in first and not deep_equal(first[key], value):
            raise BatchError(f"the batches disagree about meta_info[{key!r}]", got=(first[key], value))
    first.update(second)
    return first


_CONFLICT_FIX = "Rename one of them, or pop the old one before the union."


def _conflict(key: str) -> str:
    return f"both batches have a column {key!r}, with different values"


def _columns_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return tensors_equal(a, b)
    if isinstance(a, TensorDict) and isinstance(b, TensorDict):
        return set(a.keys()) == set(b.keys()) and all(_columns_equal(value, b.get(key)) for key, value in a.items())
    return bool((a == b).all())
