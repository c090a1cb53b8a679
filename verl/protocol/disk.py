"""`DataProto` on disk: one safetensors file, readable by any tool that reads safetensors, and never a pickle.

Tensors are stored under ``batch.<key>``. ``document`` holds a JSON text with the non-tensor columns and ``meta_info``,
``bytes.<i>`` the raw pieces it points into (arrays, bytes, PNG images); see `codec`. Values without such a form are
refused with their key and row, before a file is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.env import expand
from verl.errors import DataError
from verl.json_text import read_json
from verl.protocol.codec import DTYPE_CODES, Decoder, Encoder, Refused, tensor_bytes
from verl.protocol.lazy import fetched_tensors
from verl.protocol.parts import BatchKind, BatchParts

FORMAT, VERSION = "verl.DataProto", "1"


def save(data: BatchParts, filepath: str | os.PathLike[str]) -> None:
    """Write the batch; the file appears whole or not at all."""
    pieces = list(serialize(data))
    path = Path(expand(os.fspath(filepath)))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                file.write(piece.data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(kind: type[BatchKind], filepath: str | os.PathLike[str]) -> BatchKind:
    """Read a file of `save`.

    Raises:
        DataError: there is no such file, it was cut off or altered, or it is something else.
    """
    path = Path(expand(os.fspath(filepath)))
    if not path.is_file():
        raise DataError("there is no such file", key=str(path), fix="It is written by DataProto.save_to_disk.")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            entries = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"this is not a whole batch file ({error})",
            key=str(path),
            fix="It was cut off, or written by something else (pickles are not read): save the batch again.",
        ) from error
    return _from_entries(kind, entries, metadata, str(path))


def serialize(data: BatchParts) -> Iterator[np.ndarray]:
    """The file's bytes as pieces: the length of the header, the header, then every tensor without a copy."""
    entries = _entries(data)
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": VERSION}}
    start = 0
    for name, (code, shape, raw) in entries.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + raw.size]}
        start += raw.size
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    yield np.frombuffer(len(text).to_bytes(8, "little"), np.uint8)
    yield np.frombuffer(text, np.uint8)
    for _, _, raw in entries.values():
        yield raw


def deserialize(kind: type[BatchKind], content: bytes) -> BatchKind:
    """The batch from the bytes that `serialize` gave."""
    from safetensors.torch import load as load_bytes

    length = int.from_bytes(content[:8], "little")
    metadata = read_json(content[8 : 8 + length])["__metadata__"]
    return _from_entries(kind, load_bytes(content), metadata, "received batch")


Entry = tuple[str, list[int], np.ndarray]


def _entries(data: BatchParts) -> dict[str, Entry]:
    """Name -> dtype code, shape, bytes; wide types first, so that everything stays aligned."""
    entries: dict[str, Entry] = {}
    for key, value in fetched_tensors({} if data.batch is None else dict(data.batch.items())).items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dtype not in DTYPE_CODES:
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise DataError("this column cannot be written to a file", key=f"batch[{key!r}]", got=str(kind))
        entries[f"batch.{key}"] = DTYPE_CODES[value.dtype], list(value.shape), tensor_bytes(value)
    encoder = Encoder(images="png")
    document = {
        "rows": None if data.batch is None else len(data),
        "columns": {key: _encoded(encoder, key, column) for key, column in data.non_tensor_batch.items()},
        "meta_info": _encoded_meta_info(encoder, data.meta_info),
    }
    text = np.frombuffer(json.dumps(document).encode("ascii"), np.uint8)
    entries["document"] = "U8", [text.size], text
    for index, blob in enumerate(encoder.blobs()):
        entries[f"bytes.{index}"] = "U8", [blob.size], blob
    width = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}
    return dict(sorted(entries.items(), key=lambda item: -width[item[1][0]]))


def _encoded(encoder: Encoder, key: str, column: np.ndarray) -> Any:
    try:
        return encoder.column(column)
    except Refused as refused:
        row, _, inside = refused.path.removeprefix("[").partition("]")
        where = f"non_tensor_batch[{key!r}]" + (f" row {row}{inside and ', in ' + inside}" if row else "")
        raise DataError(refused.reason, key=where, fix=_REFUSED_FIX) from None


def _encoded_meta_info(encoder: Encoder, meta_info: dict[str, Any]) -> Any:
    try:
        return encoder.encode(dict(meta_info))
    except Refused as refused:
        raise DataError(refused.reason, key=f"meta_info{refused.path}", fix=_REFUSED_FIX) from None


_REFUSED_FIX = (
    "A batch file holds numpy arrays, tensors, bytes, str, numbers, None, PIL images, and lists, tuples and dicts of "
    "them; convert the value, or drop its key with select() or pop()."
)


def _from_entries(
    kind: type[BatchKind], entries: dict[str, torch.Tensor], metadata: dict[str, str], where: str
) -> BatchKind:
    if metadata.get("format") != FORMAT or "document" not in entries:
        raise DataError("this safetensors file does not hold a batch", key=where, got=sorted(entries)[:5])
    if metadata.get("version") != VERSION:
        raise DataError("this batch file has another version", key=where, got=metadata["version"], allowed=VERSION)
    blobs = [entries[f"bytes.{i}"].numpy() for i in range(sum(name.startswith("bytes.") for name in entries))]
    document = Decoder(blobs).decode(entries["document"].numpy().tobytes())
    tensors = {name.removeprefix("batch."): value for name, value in entries.items() if name.startswith("batch.")}
    try:
        rows, columns, meta_info = document["rows"], document["columns"], document["meta_info"]
        batch = None if rows is None else TensorDict(tensors, batch_size=[rows])
        return kind(batch=batch, non_tensor_batch=dict(columns), meta_info=dict(meta_info))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"this batch file contradicts itself ({error})", key=where) from error
