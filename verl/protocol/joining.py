"""Joining columns of several batches: pad to the longest by declaration, then copy once into fresh memory.

``torch.cat`` runs below the speed of a plain copy, so large columns are copied piece by piece into a preallocated
tensor, by as many threads as torch uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from verl.errors import BatchError
from verl.protocol.codec import tensor_bytes
from verl.protocol.equality import deep_equal
from verl.protocol.fields import PAD_TOKEN_KEY, Field, PaddingValue, declared_field, missing_key_error
from verl.protocol.lazy import LazyColumn, fetched, join_lazy, pad_lazy
from verl.protocol.stored import pad_axis

LARGE_BYTES = 1 << 20
"""From this size on the preallocated copy beats ``torch.cat``."""
PIECE_BYTES = 1 << 22


def join_tensordicts(parts: Sequence[TensorDictBase], meta_info: Mapping[str, Any]) -> TensorDict:
    """The rows of all parts, in order; columns with a declared time axis are padded to the longest part."""
    keys = _common_keys([list(part.keys()) for part in parts], "tensor columns")
    widths = [_Widths.of(part) for part in parts]
    rows = sum(part.batch_size[0] for part in parts)
    device = parts[0].device if all(part.device == parts[0].device for part in parts) else None
    joined = {key: _join_column(key, [part.get(key) for part in parts], widths, meta_info) for key in keys}
    return TensorDict(joined, batch_size=[rows], device=device)


def join_arrays(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    keys = _common_keys([list(part) for part in parts], "non-tensor columns")
    joined = {}
    for key in keys:
        arrays = [part[key] for part in parts]
        if len({array.shape[1:] for array in arrays}) > 1:
            raise BatchError(
                f"the non-tensor column {key!r} has rows of different shapes",
                got=[array.shape for array in arrays],
                fix="Make it a one-dimensional object array.",
            )
        joined[key] = np.concatenate(arrays, axis=0)
    return joined


def join_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The union; a key in several parts must hold equal values, except ``metrics``: those are gathered into lists."""
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for part in parts:
        for key, value in part.items():
            if key == "metrics" and value is not None:
                metrics.extend(value if isinstance(value, (list, tuple)) else [value])
            elif key in merged and not deep_equal(merged[key], value):
                raise BatchError(
                    f"the batches disagree about meta_info[{key!r}]",
                    got=[merged[key], value],
                    fix="Make it equal, or move it to the 'metrics' of meta_info, which are gathered.",
                )
            else:
                merged[key] = value
    if metrics:
        gathered: dict[str, list[Any]] = {}
        for entry in metrics:
            for name, value in entry.items():
                gathered.setdefault(name, []).append(value)
        merged["metrics"] = gathered
    return merged


def cat_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat(parts, dim=0)`` at the speed of a copy into fresh memory."""
    first = parts[0]
    alike = {(type(p), p.layout, p.dtype, p.device, p.requires_grad) for p in parts}
    plain = alike == {(torch.Tensor, torch.strided, first.dtype, first.device, False)}
    rows = sum(len(p) for p in parts)
    if not plain or rows * math.prod(first.shape[1:]) * first.element_size() < LARGE_BYTES:
        return torch.cat(list(parts), dim=0)
    out = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
    targets = out.split([len(part) for part in parts])
    threads = torch.get_num_threads()
    if first.device.type != "cpu" or threads == 1:
        for target, part in zip(targets, parts):
            target.copy_(part)
        return out
    pieces = [piece for target, part in zip(targets, parts) for piece in _pieces(target, part)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: np.copyto(*piece), pieces))
    return out


def _pieces(target: torch.Tensor, part: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Small copies for threads that take the next one when they are free, which torch's even shares cannot."""
    to, source = tensor_bytes(target), tensor_bytes(part)
    return [(to[i : i + PIECE_BYTES], source[i : i + PIECE_BYTES]) for i in range(0, source.size, PIECE_BYTES)]


class _Widths:
    """Prompt and response width of one batch, as far as its columns tell."""

    def __init__(self, prompt: int | None, response: int | None):
        self.prompt, self.response = prompt, response

    @classmethod
    def of(cls, batch: TensorDictBase) -> _Widths:
        widths: dict[str, int] = {}
        for key, value in batch.items():
            field = declared_field(key)
            if field is not None and field.time_axis is not None and value.dim() >= -field.time_axis + 1:
                widths.setdefault(str(field.time_symbol), value.shape[field.time_axis])
        prompt, response, both = widths.get("P"), widths.get("T"), widths.get("P+T")
        if both is not None and prompt is None and response is not None:
            prompt = both - response
        if both is not None and response is None and prompt is not None:
            response = both - prompt
        return cls(prompt, response)


def _join_column(key: str, parts: list[Any], widths: list[_Widths], meta_info: Mapping[str, Any]) -> Any:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat(parts, dim=0)  # a nested TensorDict
    field = declared_field(key)
    if field is not None and field.time_axis is not None and _time_axis_exists(field, parts):
        parts = _padded(field, parts, widths, meta_info)
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise BatchError(
            f"the column {key!r} has rows of different shapes, and no declaration says how to pad them",
            got=[tuple(part.shape) for part in parts],
            fix=f"Declare it: verl.protocol.declare_field({key!r}, dtype, ('B', 'T'), producer, padding_value).",
        )
    lazy = join_lazy(parts)
    return cat_rows([fetched(part) for part in parts]) if lazy is None else lazy


def _time_axis_exists(field: Field, parts: list[torch.Tensor]) -> bool:
    return all(part.dim() >= 1 - int(field.time_axis or 0) for part in parts)


def _padded(
    field: Field, parts: list[torch.Tensor], widths: list[_Widths], meta_info: Mapping[str, Any]
) -> list[torch.Tensor]:
    axis = int(field.time_axis or 0)
    value = field.padding_value
    if value == "pad_token":
        value = meta_info.get(PAD_TOKEN_KEY, 0)
    if field.time_symbol != "P+T":
        longest = max(part.shape[axis] for part in parts)
        left = field.time_symbol == "P"
        return [_pad(part, axis, longest - part.shape[axis], value, left) for part in parts]
    known = [
        w.prompt is not None and w.response is not None and w.prompt + w.response == part.shape[axis]
        for w, part in zip(widths, parts)
    ]
    if not all(known):
        if len({part.shape[axis] for part in parts}) == 1:
            return parts
        raise BatchError(
            f"the column {field.name!r} has different widths, and its batch does not say where responses start",
            got=[tuple(part.shape) for part in parts],
            fix="Keep 'prompts' or 'responses' in the batches that are joined.",
        )
    prompt = max(int(w.prompt or 0) for w in widths)
    response = max(int(w.response or 0) for w in widths)
    return [
        _pad(
            _pad(part, axis, prompt - int(w.prompt or 0), value, left=True),
            axis,
            response - int(w.response or 0),
            value,
            left=False,
        )
        for w, part in zip(widths, parts)
    ]


def _pad(part: torch.Tensor, axis: int, count: int, value: PaddingValue, left: bool) -> torch.Tensor:
    if count == 0:
        return part
    padded = pad_lazy(part, axis, count, value, left) if isinstance(part, LazyColumn) else None
    if padded is not None:
        return padded
    return pad_axis(fetched(part), axis, *((count, 0) if left else (0, count)), value)


def _common_keys(keys: list[list[str]], what: str) -> list[str]:
    for index, names in enumerate(keys):
        for key in set(keys[0]) ^ set(names):
            holder, lacks = (0, index) if key in keys[0] else (index, 0)
            error = missing_key_error(key, keys[lacks], f"batch {lacks} (batch {holder} has it)")
            raise BatchError(f"batches with different {what} cannot be joined: {error.message}", fix=error.fix)
    return keys[0]
