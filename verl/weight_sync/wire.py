"""A chunk of weights as bytes: a JSON header and one flat buffer, without anything that could execute code.

The header names tensors, shapes, dtypes and places. The reader checks every number against the buffer before a
tensor is made, because a transport may deliver what another process wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from verl.errors import RolloutError
from verl.json_text import read_json
from verl.protocol.codec import DTYPE_CODES, DTYPES
from verl.weight_sync.chunks import WeightChunk

ALIGNMENT = 64
MAX_HEADER = 1 << 26


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ChunkLayout:
    """What a buffer holds."""

    version: int
    last: bool
    entries: list[TensorPlace]

    @property
    def num_bytes(self) -> int:
        """Length of the buffer."""
        return max((_aligned(e.offset + e.num_bytes) for e in self.entries), default=0)

    @classmethod
    def of(cls, chunk: WeightChunk) -> ChunkLayout:
        entries, offset = [], 0
        for name, tensor in chunk.tensors:
            if tensor.dtype not in DTYPE_CODES:
                raise RolloutError("weights of this dtype cannot be sent", key=name, got=str(tensor.dtype))
            entries.append(TensorPlace(name, tensor.dtype, tuple(tensor.shape), offset))
            offset = _aligned(offset + entries[-1].num_bytes)
        return cls(chunk.version, chunk.last, entries)

    def encode(self, **more: Any) -> bytes:
        """JSON; ``more`` are fields of the transport's own."""
        rows = [[e.name, DTYPE_CODES[e.dtype], list(e.shape), e.offset] for e in self.entries]
        return json.dumps({"version": self.version, "last": self.last, "tensors": rows, **more}).encode()

    @classmethod
    def decode(cls, text: bytes) -> tuple[ChunkLayout, dict[str, Any]]:
        """A layout and the fields of the transport.

        Raises:
            RolloutError: this is no header.
        """
        try:
            header = read_json(text)
            entries = [
                TensorPlace(str(name), DTYPES[dtype], tuple(int(n) for n in shape), int(offset))
                for name, dtype, shape, offset in header.pop("tensors")
            ]
            layout = cls(int(header.pop("version")), bool(header.pop("last")), entries)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RolloutError(f"a header of weights cannot be read: {type(error).__name__}: {error}") from error
        if any(e.offset < 0 or e.offset % ALIGNMENT or min(e.shape, default=0) < 0 for e in entries):
            raise RolloutError("a header of weights describes an impossible layout")
        return layout, header


def write_into(chunk: WeightChunk, layout: ChunkLayout, buffer: torch.Tensor) -> None:
    """Copy a chunk's tensors to their places in a 1-D uint8 buffer, on whichever device it is."""
    with torch.no_grad():
        for (_, tensor), place in zip(chunk.tensors, views(layout, buffer)):
            place[1].copy_(tensor.detach(), non_blocking=True)


def views(layout: ChunkLayout, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that look into a 1-D uint8 buffer.

    Raises:
        RolloutError: one of them would lie outside.
    """
    for e in layout.entries:
        end = e.offset + e.num_bytes
        if end > buffer.numel():
            raise RolloutError("a weight lies outside its buffer", key=e.name, got=end)
        yield e.name, buffer[e.offset : end].view(e.dtype).view(e.shape)


def chunk_of(layout: ChunkLayout, buffer: torch.Tensor) -> WeightChunk:
    """The chunk whose tensors look into a 1-D uint8 buffer.

    Raises:
        RolloutError: one of them would lie outside.
    """
    return WeightChunk(layout.version, list(views(layout, buffer)), layout.last)


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
