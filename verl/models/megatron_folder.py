"""A model folder whose weights are Megatron-Core's, whole and in safetensors; read under Hugging Face names.

`scripts/converter_hf_to_mcore.py` writes it and every loader of a model folder takes it. ``megatron.json`` maps each
Hugging Face weight to one of Megatron-Core's. Nothing in the folder depends on parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.errors import ModelError
from verl.json_text import read_json
from verl.models.folder import CONVERTED
from verl.models.megatron import GATED, QKV, qkv_part

FORMAT = 1
FILES = "megatron-*.safetensors"


@dataclass(frozen=True)
class Heads:
    """What cuts a fused query, key and value weight: KV groups, query heads, and the width of a head."""

    num_query_groups: int
    num_attention_heads: int
    kv_channels: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Heads:
        """From the settings of a family."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__})

    def rows(self, part: int) -> int:
        """Rows of one group in the query, key or value weight."""
        return (self.num_attention_heads // self.num_query_groups if part == 0 else 1) * self.kv_channels


@dataclass(frozen=True)
class FolderPlace:
    """Where a Hugging Face weight is stored: in the weight ``ours``, all of it or its ``part``."""

    ours: str
    form: str
    part: int


def write_manifest(folder: Path, heads: Heads, places: Mapping[str, FolderPlace]) -> None:
    """Say that the folder is complete, and what is where."""
    weights = {name: [place.ours, place.form, place.part] for name, place in places.items()}
    text = json.dumps({"format": FORMAT, "heads": asdict(heads), "weights": weights}, indent=1)
    (folder / CONVERTED).write_text(text + "\n", encoding="utf-8")


class FusedFile:
    """The files of a converted folder, as one that holds the Hugging Face weights.

    Args:
        files: Megatron-Core's name -> the open file that holds it.

    Raises:
        ModelError: the manifest cannot be read, or a weight of it is in no file.
    """

    def __init__(self, folder: Path, files: Mapping[str, Any]):
        self._files = files
        try:
            content = read_json((folder / CONVERTED).read_text(encoding="utf-8"))
            self._heads = Heads(**content["heads"])
            self._places = {name: FolderPlace(*place) for name, place in content["weights"].items()}
            is_format = content["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"its {CONVERTED} cannot be read: {error}", got=str(folder)) from error
        if not is_format:
            raise ModelError(f"its {CONVERTED} has another format", got=content["format"], allowed=str(FORMAT))
        for place in self._places.values():
            if place.ours not in files:
                raise ModelError(f"no file of this folder holds {place.ours}", got=str(folder), fix="Convert it again.")

    def keys(self) -> Iterator[str]:
        """Hugging Face names."""
        return iter(self._places)

    def get_slice(self, name: str) -> FusedSlice:
        """As safetensors' open files have it."""
        place = self._places[name]
        return FusedSlice(self._files[place.ours].get_slice(place.ours), place, self._heads)


class FusedSlice:
    """One Hugging Face weight within one of Megatron-Core's; only the slices that are indexed are read."""

    def __init__(self, weight: Any, place: FolderPlace, heads: Heads):
        self._weight, self._place, self._heads = weight, place, heads

    def get_shape(self) -> list[int]:
        """Of the Hugging Face weight."""
        shape = list(self._weight.get_shape())
        if self._place.form == GATED:
            shape[0] //= 2
        elif self._place.form == QKV:
            shape[0] = self._heads.num_query_groups * self._heads.rows(self._place.part)
        return shape

    def get_dtype(self) -> str:
        """As safetensors writes it."""
        return str(self._weight.get_dtype())

    def __getitem__(self, cut: tuple[slice, ...]) -> Tensor:
        low, high, _ = (cut[0] if cut else slice(None)).indices(self.get_shape()[0])
        if self._place.form == GATED:
            start = self._place.part * self.get_shape()[0]
            return self._weight[(slice(start + low, start + high), *cut[1:])]
        if self._place.form == QKV:
            return self._heads_between(low, high, cut[1:])
        return self._weight[cut]

    def _heads_between(self, low: int, high: int, rest: tuple[slice, ...]) -> Tensor:
        heads, rows = self._heads, self._heads.rows(self._place.part)
        first, last = low // rows, -(-high // rows)
        together = self._weight.get_shape()[0] // heads.num_query_groups
        fused = self._weight[(slice(first * together, last * together), *rest)]
        part = qkv_part(fused, self._place.part, last - first, asdict(heads))
        return part[low - first * rows : high - first * rows]
