"""What a batch consists of, for the modules below `DataProto` that write and read it."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
from tensordict import TensorDictBase


class BatchParts(Protocol):
    """The fields of a `DataProto` (see there), and its number of rows."""

    batch: TensorDictBase | None
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    def __init__(
        self, batch: TensorDictBase | None, non_tensor_batch: dict[str, np.ndarray], meta_info: dict[str, Any]
    ): ...

    def __len__(self) -> int: ...


BatchKind = TypeVar("BatchKind", bound=BatchParts)
