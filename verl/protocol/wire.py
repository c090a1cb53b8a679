"""How a batch travels between processes.

On a transport that understands out-of-band buffers (pickle protocol 5, as Ray's object store does) every tensor,
array and encoded object column is one or more flat numpy arrays, which numpy passes on without a copy. A row slice is
sent as its rows only, never with the whole storage behind it. Of a column stored elsewhere (`LazyColumn`) its plan
is sent, with the references that the rows need. What arrives is on the CPU and may be read-only memory: a worker that
wants to write into a tensor clones it first.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.protocol.codec import DTYPE_CODES, DTYPES, Decoder, Encoder, Refused, tensor_bytes, tensor_from_bytes
from verl.protocol.lazy import LazyColumn
from verl.protocol.parts import BatchKind, BatchParts

Packed = tuple[Any, ...]


def reduce_batch(data: BatchParts) -> tuple[Any, ...]:
    """The reduction of a batch: a module-level function and its arguments, in which all memory is numpy's."""
    batch = None if data.batch is None else _pack_tensors(data.batch)
    columns = {key: _pack_column(column) for key, column in data.non_tensor_batch.items()}
    return rebuild_batch, (type(data), batch, columns, data.meta_info)


def rebuild_batch(
    kind: type[BatchKind], batch: Packed | None, columns: dict[str, Packed], meta_info: dict[str, Any]
) -> BatchKind:
    return kind(
        batch=None if batch is None else _unpack_tensors(batch),
        non_tensor_batch={key: _unpack_column(packed) for key, packed in columns.items()},
        meta_info=meta_info,
    )


def _pack_tensors(batch: TensorDictBase) -> Packed:
    return tuple(batch.batch_size), {key: _pack_tensor(value) for key, value in batch.items()}


def _unpack_tensors(packed: Packed) -> TensorDict:
    batch_size, values = packed
    return TensorDict({key: _unpack_tensor(value) for key, value in values.items()}, batch_size=batch_size)


def _pack_tensor(value: Any) -> Packed:
    if isinstance(value, TensorDictBase):
        return "nested", _pack_tensors(value)
    if isinstance(value, LazyColumn):
        return "lazy", value.plan
    if type(value) is torch.Tensor and value.layout == torch.strided and value.dtype in DTYPE_CODES:
        return "plain", DTYPE_CODES[value.dtype], tuple(value.shape), tensor_bytes(value)
    return "as it is", value  # jagged and other special tensors know how to reduce themselves


def _unpack_tensor(packed: Packed) -> Any:
    form, *rest = packed
    if form == "nested":
        return _unpack_tensors(rest[0])
    if form == "lazy":
        return LazyColumn(rest[0])
    if form == "plain":
        code, shape, raw = rest
        return tensor_from_bytes(raw, DTYPES[code], shape)
    return rest[0]


def _pack_column(column: np.ndarray) -> Packed:
    """Numbers as they are; objects as JSON and bytes where they can be, else left to the transport."""
    if column.dtype != object:
        return "array", np.ascontiguousarray(column)
    encoder = Encoder(images="raw")
    try:
        text = json.dumps(encoder.column(column)).encode("ascii")
    except (Refused, ValueError):
        return "objects", column
    return "encoded", np.frombuffer(text, np.uint8), encoder.blobs()


def _unpack_column(packed: Packed) -> np.ndarray:
    form, *rest = packed
    if form == "encoded":
        text, blobs = rest
        return Decoder(blobs).decode(text.tobytes())
    return rest[0]
