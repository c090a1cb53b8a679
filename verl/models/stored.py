"""A model's weights in a folder's files, under their names in memory: any part of any is read by itself.

In files a weight may have another name, and be several (the experts of a mixture): the family's conversion says where
each part is. What no file holds, a new head or an adapter, comes from a hollow model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from verl.errors import ModelError
from verl.models import folder as model_folder
from verl.models.hollow import new_tensors
from verl.models.nf4 import quantize_frozen
from verl.models.slices import SlicedFolder
from verl.models.weights import WeightPlace, named_tensors, places_on_disk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Bounds = Sequence[tuple[int, int]]
"""Begin and end along each axis."""


@dataclass(frozen=True)
class StoredBlock:
    """A weight of a file as a block of one in memory.

    Args:
        name: in the file.
        shape: in the file.
        start: where the block begins in memory, per axis there.
        axes: of each axis in the file, which one it is in memory; None where it has a length of one.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, name: str, place: WeightPlace, shape: Sequence[int]) -> StoredBlock | None:
        """None where the place is no block of a contiguous tensor of this shape."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        start, rest = [], place.offset
        for stride in strides:
            start.append(rest // stride)
            rest %= stride
        axes: list[int | None] = []
        for length, stride in zip(place.shape, place.strides):
            fits = [k for k, s in enumerate(strides) if s == stride and shape[k] > 1 and k not in axes]
            if length > 1 and (not fits or start[fits[0]] + length > shape[fits[0]]):
                return None
            axes.append(fits[0] if length > 1 else None)
        return cls(name, place.shape, tuple(start), tuple(axes))

    @property
    def order(self) -> list[int]:
        """The file's axes in the order of memory."""
        placed = [(-1 if axis is None else axis, number) for number, axis in enumerate(self.axes)]
        return [number for _, number in sorted(placed)]

    def shared(self, bounds: Bounds) -> tuple[list[tuple[int, int]], list[tuple[int, int]]] | None:
        """What the block has in common with a box in memory, in the file and in memory; None if nothing."""
        lengths = [1] * len(self.start)
        for length, axis in zip(self.shape, self.axes):
            if axis is not None:
                lengths[axis] = length
        inside = [
            (max(low, first), min(high, first + length))
            for (low, high), first, length in zip(bounds, self.start, lengths)
        ]
        if any(low >= high for low, high in inside):
            return None
        in_file = [
            (0, 1) if axis is None else (inside[axis][0] - self.start[axis], inside[axis][1] - self.start[axis])
            for axis in self.axes
        ]
        return in_file, inside


class Boxes(Protocol):
    """Weights under their names in files, of which parts can be read."""

    def __contains__(self, name: str) -> bool: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def box(self, name: str, bounds: Bounds) -> Tensor: ...


class StoredWeights:
    """See `stored_weights`."""

    def __init__(
        self,
        folder: Boxes,
        shapes: Mapping[str, torch.Size],
        blocks: Mapping[str, list[StoredBlock]],
        new: Mapping[str, Tensor],
    ):
        self._folder, self._shapes, self._blocks, self._new = folder, shapes, blocks, new

    @classmethod
    def of(cls, files: Boxes, model: PreTrainedModel) -> StoredWeights | None:
        """Of files that hold all weights of a model without adapter; None where they are no parts of those in memory.

        Args:
            model: only its names and shapes count.

        Raises:
            ModelError: the files lack a weight, or have it in another shape.
        """
        tensors = named_tensors(model)
        blocks = _blocks(files, model, {name: (name, tensor) for name, tensor in tensors.items()}, "this checkpoint")
        if blocks is None:
            return None
        return cls(files, {name: tensor.shape for name, tensor in tensors.items()}, blocks, {})

    @classmethod
    def renamed(cls, files: Boxes, names: Mapping[str, str]) -> StoredWeights:
        """Of files that hold weights as they are in memory, under other names: name in memory -> name in the files."""
        shapes = {name: torch.Size(files.shape(other)) for name, other in names.items()}
        blocks = {
            name: [StoredBlock(other, tuple(shapes[name]), (0,) * len(shapes[name]), tuple(range(len(shapes[name]))))]
            for name, other in names.items()
        }
        return cls(files, shapes, blocks, {})

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> torch.Size:
        """Of a full weight."""
        return self._shapes[name]

    def box(self, name: str, bounds: Bounds) -> Tensor:
        """A part of a weight, in memory of its own or a view of new ones, in the dtype that the file has."""
        if name in self._new:
            return self._new[name][tuple(slice(low, high) for low, high in bounds)]
        values: Tensor | None = None
        for block in self._blocks[name]:
            shared = block.shared(bounds)
            if shared is None:
                continue
            in_file, inside = shared
            value = self._folder.box(block.name, in_file)
            value = value.permute(block.order).reshape([high - low for low, high in inside])
            if inside == list(bounds):
                return value
            if values is None:
                values = torch.empty([high - low for low, high in bounds], dtype=value.dtype)
            at = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(inside, bounds))
            values[at] = value
        if values is None:
            values = torch.empty([max(high - low, 0) for low, high in bounds])
        return values


@contextlib.contextmanager
def stored_weights(path: str, model: PreTrainedModel) -> Iterator[StoredWeights]:
    """Within the block the weights of the folder at ``path`` can be read in parts.

    Args:
        model: a hollow one (`verl.models.hollow`), whose names and shapes count; it may have an adapter.

    Raises:
        ModelError: they cannot, for the reason that the message gives.
    """
    if not Path(model_folder.resolve_model(path)).is_dir():
        raise ModelError("the weights are not in a folder of this machine", got=path)
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError("the weights are quantized", got=path)
    new = new_tensors(model)
    tensors = {name: tensor for name, tensor in named_tensors(model).items() if name not in new}
    in_base = {name.replace(".base_layer", ""): (name, tensor) for name, tensor in tensors.items()}
    with SlicedFolder.opened(path) as folder:
        blocks = _blocks(folder, model, in_base, path)
        if blocks is None:
            raise ModelError("weights of the files are no parts of those in memory", got=type(model).__name__)
        yield StoredWeights(folder, {name: t.shape for name, t in (tensors | new).items()}, blocks, new)


@torch.no_grad()
def fill_quantized(model: PreTrainedModel, stored: StoredWeights) -> None:
    """Give a hollow model its values, linear layers in 4 bits (`verl.models.nf4`), one weight at a time.

    Raises:
        ModelError: what is stored lacks a weight.
    """

    def read(name: str) -> Tensor:
        return stored.box(name, [(0, length) for length in stored.shape(name)])

    fresh = set(new_tensors(model))
    quantize_frozen(model, read)
    for name, tensor in named_tensors(model).items():
        if name not in fresh:
            tensor.data = read(name).to(tensor.dtype)


def _blocks(
    files: Boxes, model: PreTrainedModel, tensors: Mapping[str, tuple[str, Tensor]], where: str
) -> dict[str, list[StoredBlock]] | None:
    """The blocks of every weight in memory; None where weights of the files are no parts of those.

    Args:
        tensors: name without an adapter -> name in memory and the weight.

    Raises:
        ModelError: the files lack a weight, or have it in another shape.
    """
    places = places_on_disk(model, {name: tensor for name, (_, tensor) in tensors.items()})
    if places is None:
        return None
    blocks: dict[str, list[StoredBlock]] = {}
    for name, place in places.items():
        owner, tensor = tensors[place.owner]
        block = StoredBlock.of(name, place, tensor.shape)
        if block is None or name not in files or tuple(files.shape(name)) != place.shape:
            raise ModelError(f"the files do not hold {name} as it is in memory", got=where)
        blocks.setdefault(owner, []).append(block)
    return blocks
