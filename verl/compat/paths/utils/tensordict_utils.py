"""Tensors and other values of a batch in one TensorDict, under upstream's path."""

from collections.abc import Mapping
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """A batch of tensors and lists with one entry per row; ``non_tensor_dict``: values of the batch as a whole."""
    rows = {len(value) for value in tensor_dict.values()}
    if len(rows) > 1:
        raise AssertionError(f"columns of one batch have one length, got {sorted(rows)}")
    columns = {k: v if isinstance(v, Tensor) else NonTensorStack(*v) for k, v in tensor_dict.items()}
    made = TensorDict(columns, batch_size=[rows.pop()] if rows else [])
    return assign_non_tensor(made, **(non_tensor_dict or {}))


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: Any) -> TensorDict:
    """Set values of the batch as a whole; returns it."""
    for name, value in kwargs.items():
        tensor_dict[name] = NonTensorData(value, batch_size=tensor_dict.batch_size)
    return tensor_dict


def get(tensordict: TensorDict, key: str, default: Any = None) -> Any:
    """The tensor, the list of a column, or the value of the batch as a whole."""
    value = tensordict.get(key, None)
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return default if value is None else getattr(value, "data", value) if not isinstance(value, Tensor) else value


def get_non_tensor_data(data: TensorDict, key: str, default: Any = None) -> Any:
    """`get`, under upstream's older name and its names of parameters."""
    return get(data, key, default)
