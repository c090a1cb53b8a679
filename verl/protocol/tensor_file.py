"""All tensors of a safetensors file at a few microseconds each, the large ones as views of one mapping of the file.

The library's own reading takes fifty for each, which a file of some hundred thousand tensors makes seconds. The format
is still checked by the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.json_text import read_json
from verl.protocol.codec import DTYPES

SMALL = 1 << 16
"""Bytes of a tensor that is read at once, unless the caller says otherwise."""


def read_tensor_file(path: str | Path, small: int = SMALL) -> dict[str, Tensor]:
    """Name -> tensor, on the CPU; writing to one changes the copy in memory alone.

    Args:
        small: bytes up to which a tensor has memory of its own; of the others nothing is read before it is used.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is cut off, damaged, or holds a dtype that torch does not have.
    """
    try:
        with safe_open(path, framework="pt"):  # the header: sizes, offsets without gaps or overlaps, the file's length
            pass
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = read_json(file.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if not end:
        return {name: torch.empty(entry["shape"], dtype=_dtype(name, entry)) for name, entry in header.items()}
    content = torch.from_file(str(path), shared=False, size=8 + length + end, dtype=torch.uint8)[8 + length :]
    return {name: _tensor(content, name, entry, small if length % 8 == 0 else end) for name, entry in header.items()}


def _tensor(content: Tensor, name: str, entry: dict[str, Any], small: int) -> Tensor:
    first, last = entry["data_offsets"]
    dtype = _dtype(name, entry)
    raw = content[first:last]
    if last - first <= small or first % dtype.itemsize:
        raw = raw.clone()  # torch's generators read a state from the beginning of its storage, whatever its offset
    return raw.view(dtype).view(entry["shape"])


def _dtype(name: str, entry: dict[str, Any]) -> torch.dtype:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the dtype {entry['dtype']}, which is not read")
    return DTYPES[entry["dtype"]]
