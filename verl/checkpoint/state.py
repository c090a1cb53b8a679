"""The state that an engine saves and resumes from: tensors by name and JSON, in three sections.

Tensor names start with their section: ``model/<hugging face name>``, ``optimizer/<parameter>/<key>``, ``extra/<name>``
(random number generators). ``scalars`` has one JSON object per section. A checkpoint may hold any of the sections, and
a loader takes what is there.

A state that is saved is one rank's: the tensors, or boxes of them, that this rank writes. A state that is loaded is
complete on every rank, and each reads of it what it needs: `StateSection.box`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from verl.protocol.sharding import ShardSpec

SECTIONS = ("model", "optimizer", "extra")
Bounds = Sequence[tuple[int, int]]
"""Begin and end along each axis."""


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that lie in files; looking one up makes it complete in memory, a box of it does not."""

    @abstractmethod
    def spec(self, name: str) -> ShardSpec:
        """Shape and dtype of a complete tensor."""

    @abstractmethod
    def box(self, name: str, bounds: Bounds) -> Tensor:
        """A part of a tensor; it may be a view of the file."""


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a Hugging Face folder that several ranks write.

    Args:
        names: weight -> name of its file, of all weights of all ranks.
        num_bytes: of all of them.
    """

    names: Mapping[str, str]
    num_bytes: int

    @classmethod
    def of(cls, weights: Sequence[Sequence[tuple[str, int]]], max_bytes: int) -> WeightFiles:
        """Share weights out to files; none grows larger than ``max_bytes``, except for a single weight.

        Args:
            weights: of every rank, name and bytes of each, in the order in which it writes them.
        """
        files: list[list[str]] = []
        for shard in weights:
            room = 0
            for name, size in shard:
                if not room or size > room:
                    files.append([])
                    room = max_bytes
                files[-1].append(name)
                room = max(0, room - size)
        count = len(files)
        titles = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        if count == 1:
            titles = ["model.safetensors"]
        names = {name: title for title, held in zip(titles, files) for name in held}
        return cls(names, sum(size for shard in weights for _, size in shard))

    def index(self) -> str:
        """The text by which transformers finds a weight's file."""
        content = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(self.names.items()))}
        return json.dumps(content, indent=2) + "\n"


@dataclass(frozen=True)
class EngineState:
    """Everything that decides what an engine does next.

    Args:
        tensors: section-prefixed name -> tensor; they may share the engine's memory: save or copy before training on.
        scalars: section -> JSON object.
        shards: which box of a tensor it is, where it is not all of it.
        rank, num_ranks: whose state it is, where several ranks write one checkpoint together.
        files: where weights go that several ranks write.
        fresh: names of tensors whose memory belongs to this state alone.

    Example:
        >>> EngineState({"model/lm_head.weight": w, "extra/rng/cpu": rng}, {"extra": {"scheduler_step": 3}})
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    shards: Mapping[str, ShardSpec] = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1
    files: WeightFiles | None = None
    fresh: frozenset[str] = frozenset()

    def section(self, name: str) -> StateSection:
        """The tensors of one section, without its prefix."""
        return StateSection(self, name)

    def only(self, sections: Iterable[str]) -> EngineState:
        """The same state with these sections alone."""
        keep = set(sections)
        return self.having(
            {key: tensor for key, tensor in self.tensors.items() if key.split("/", 1)[0] in keep},
            {key: value for key, value in self.scalars.items() if key in keep},
        )

    def having(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> EngineState:
        """The same place in a checkpoint with other values."""
        return EngineState(tensors, scalars, self.shards, self.rank, self.num_ranks, self.files, self.fresh)


class StateSection(Mapping[str, Tensor]):
    """See `EngineState.section`; a state in files is read on lookup only."""

    def __init__(self, state: EngineState, section: str):
        self._tensors, self._prefix = state.tensors, f"{section}/"
        size = len(self._prefix)
        self._names = {name[size:]: name for name in state.tensors if name.startswith(self._prefix)}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def only(self, names: Iterable[str]) -> StateSection:
        """Those of its tensors that have these names."""
        part = copy(self)
        part._names = {name: self._names[name] for name in names}
        return part

    def shape(self, name: str) -> torch.Size:
        """Of a complete tensor."""
        full = self._names[name]
        if isinstance(self._tensors, LazyTensors):
            return torch.Size(self._tensors.spec(full).shape)
        return self._tensors[full].shape

    def box(self, name: str, bounds: Bounds) -> Tensor:
        """A part of a tensor, to be copied; nothing else of it is read."""
        full = self._names[name]
        if isinstance(self._tensors, LazyTensors):
            return self._tensors.box(full, bounds)
        return self._tensors[full][tuple(slice(low, high) for low, high in bounds)]

    def blank(self) -> dict[str, Tensor]:
        """Names, shapes and dtypes, without values (``meta``)."""
        if not isinstance(self._tensors, LazyTensors):
            return {name: self[name].to("meta") for name in self}
        specs = {name: self._tensors.spec(full) for name, full in self._names.items()}
        return {name: torch.empty(s.shape, dtype=s.torch_dtype, device="meta") for name, s in specs.items()}


def prefixed(section: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names with the section in front."""
    return {f"{section}/{name}": tensor for name, tensor in tensors.items()}
