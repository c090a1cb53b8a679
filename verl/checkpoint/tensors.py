"""Tensors to disk in the safetensors format, straight from their memory.

The format is a length, a JSON header and the raw bytes. Writing it here instead of through the library saves a copy of
every tensor and a second pass for the checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from verl.checkpoint.files import FileRecord
from verl.checkpoint.stream import FileStream
from verl.errors import CheckpointError
from verl.json_text import read_json
from verl.protocol.codec import DTYPE_CODES, tensor_bytes
from verl.protocol.tensor_file import SMALL, read_tensor_file

DTYPE_NAMES = {dtype: code for dtype, code in DTYPE_CODES.items() if not dtype.is_complex}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    progress: Callable[[int], None] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write tensors from any device, one at a time, and wait until the disk has them.

    Args:
        metadata: for the header.
        progress: called with the number of bytes written so far after each tensor.

    Raises:
        OSError: the disk is full, read-only, ...
        CheckpointError: a dtype that the format does not know.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header = _header(order, tensors, metadata or {})
    size = len(header)
    with FileStream(path, size + sum(tensor.nbytes for tensor in tensors.values())) as stream:
        stream.write(header)
        for name in order:
            data = tensor_bytes(tensors[name]).data
            stream.write(data)
            size += len(data)
            if progress is not None:
                progress(size)
    return stream.record


def read_tensors(path: Path, small: int = SMALL) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU; those of more than ``small`` bytes are read when they are used.

    Raises:
        CheckpointError: the file is absent or damaged.
    """
    try:
        return read_tensor_file(path, small)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"this file cannot be read: {error}", got=str(path)) from error


def read_metadata(path: Path) -> dict[str, str]:
    """What a file's header says beside its tensors.

    Raises:
        CheckpointError: the file is absent or damaged.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("it is cut off")
            header = read_json(file.read(size))
        return {str(name): str(text) for name, text in header.get("__metadata__", {}).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"this file cannot be read: {error}", got=str(path)) from error


def _header(order: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError("safetensors has no such dtype", key=name, got=str(tensor.dtype))
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
