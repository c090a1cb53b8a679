"""Sharded files of one section of a state: every rank writes its boxes, and readers see complete tensors.

A file says in its header which number it has of how many, and of which tensors it holds which boxes. So a set of files
in which one is missing, or stands in the place of another, is noticed before a value is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint.state import Bounds, LazyTensors
from verl.checkpoint.tensors import read_metadata, read_tensors
from verl.errors import CheckpointError
from verl.json_text import read_json
from verl.protocol.sharding import ShardSpec, make_up
from verl.protocol.tensor_file import SMALL

_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


def shard_name(section: str, rank: int, num_ranks: int) -> str:
    """The file of one rank."""
    if num_ranks == 1:
        return f"{section}.safetensors"
    return f"{section}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"


def shard_metadata(rank: int, num_ranks: int, shards: Mapping[str, ShardSpec]) -> dict[str, str]:
    """What a file's header says beside the format: texts, as it can hold no others."""
    boxes = {name: [spec.shape, spec.start] for name, spec in sorted(shards.items())}
    return {"shard": f"{rank + 1} of {num_ranks}", "boxes": json.dumps(boxes, separators=(",", ":"))}


def shard_files(folder: Path, section: str) -> list[Path]:
    """The files of a section, in the order of their ranks.

    Raises:
        CheckpointError: some are missing, or there are those of several numbers of ranks.
    """
    alone = folder / f"{section}.safetensors"
    files = sorted(folder.glob(f"{section}-*-of-*.safetensors"))
    counts = {match[2] for match in map(_NUMBERED.search, (file.name for file in files)) if match}
    if not counts:
        return [alone] if alone.is_file() else []
    if len(counts) > 1 or alone.is_file():
        raise CheckpointError(f"files of {section} of different numbers of ranks lie side by side", got=str(folder))
    count = int(counts.pop())
    expected = [folder / shard_name(section, rank, count) for rank in range(count)]
    missing = next((file.name for file in expected if file not in files), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing: each rank of the run that saved has written one", got=str(folder))
    return expected


@dataclass
class _Stored:
    """A tensor in files: its shape and dtype, and the boxes that make it up."""

    spec: ShardSpec
    boxes: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)


class StoredTensors(LazyTensors):
    """Tensors of files, by section-prefixed name; values are views of the files."""

    def __init__(self) -> None:
        self._stored: dict[str, _Stored] = {}

    def add(self, section: str, files: list[Path]) -> None:
        """Take in a section that these files hold.

        Raises:
            CheckpointError: a file is damaged or is not the one that its name says, or its boxes and those of the
                others do not make up their tensors.
        """
        complete: dict[str, _Stored] = {}
        small = SMALL if section == "extra" else 0  # of the small pieces of all ranks, each needs its own alone
        for number, file in enumerate(files, start=1):
            boxes = self._boxes(file, number, len(files)) if len(files) > 1 else {}
            for name, tensor in read_tensors(file, small).items():
                shape, start = boxes.get(name, (tuple(tensor.shape), (0,) * tensor.dim()))
                spec = ShardSpec.of(tensor, shape, start)
                stored = complete.setdefault(name, _Stored(spec))
                if (stored.spec.shape, stored.spec.dtype) != (spec.shape, spec.dtype):
                    raise CheckpointError(f"two files disagree about the shape of {name}", got=str(file))
                stored.boxes.append((spec.start, tensor))
        for name, stored in complete.items():
            shape = stored.spec.shape
            if not make_up([ShardSpec.of(tensor, shape, start) for start, tensor in stored.boxes], shape):
                raise CheckpointError(f"the files of the ranks do not make up {name}", got=str(files[0].parent))
        self._stored |= {f"{section}/{name}": stored for name, stored in complete.items()}

    def add_whole(self, section: str, tensors: Mapping[str, Tensor]) -> None:
        """Take in complete tensors."""
        for name, tensor in tensors.items():
            spec = ShardSpec.of(tensor)
            self._stored[f"{section}/{name}"] = _Stored(spec, [(spec.start, tensor)])

    def spec(self, name: str) -> ShardSpec:
        return self._stored[name].spec

    def box(self, name: str, bounds: Bounds) -> Tensor:
        stored = self._stored[name]
        values: Tensor | None = None
        for start, tensor in stored.boxes:
            shared = [
                (max(low, first), min(high, first + length))
                for (low, high), first, length in zip(bounds, start, tensor.shape)
            ]
            if any(low >= high for low, high in shared):
                continue
            part = tensor[tuple(slice(low - first, high - first) for (low, high), first in zip(shared, start))]
            if shared == list(bounds):
                return part
            if values is None:
                values = torch.empty([high - low for low, high in bounds], dtype=tensor.dtype)
                if values.is_floating_point():
                    values.fill_(torch.nan)  # memory that no box covers must not pass for values
            values[tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(shared, bounds))] = part
        if values is None:  # a box of no elements
            return torch.empty([max(0, high - low) for low, high in bounds], dtype=stored.spec.torch_dtype)
        return values

    def __getitem__(self, name: str) -> Tensor:
        return self.box(name, [(0, length) for length in self._stored[name].spec.shape])

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def _boxes(self, file: Path, number: int, count: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        metadata = read_metadata(file)
        if metadata.get("shard") != f"{number} of {count}":
            raise CheckpointError(
                f"this file is not that of rank {number - 1}: it says that it is {metadata.get('shard', 'none')}",
                got=str(file),
            )
        try:
            boxes: dict[str, Any] = read_json(metadata["boxes"])
            return {name: (tuple(map(int, shape)), tuple(map(int, start))) for name, (shape, start) in boxes.items()}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError("this file does not say which parts it holds", got=str(file)) from error
