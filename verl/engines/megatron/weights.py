"""Hugging Face weights and this rank's weights of Megatron-Core: which is made of which, in both directions.

A rank never holds more than its own part: it reads slices from the folder, and gives slices to the planner of weight
transfers (`verl.weight_sync.resharding`), which brings each rank what it needs layer by layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint.state import StateSection
from verl.engines.megatron.parallel import MegatronSizes, ParallelGroups
from verl.engines.megatron.stacks import Collected, of_part, part_name, part_of_stack, stacked_shapes
from verl.errors import ModelError, suggest
from verl.metrics import notice
from verl.models.megatron import (
    COLUMNS,
    EMBEDDING,
    FINAL_NORM,
    GATED,
    HALVES,
    OUTPUT,
    QKV,
    ROWS,
    VALUE_HEAD,
    VOCABULARY,
    Family,
    Slot,
    filled,
    fused,
    qkv_part,
    slots_of,
)
from verl.models.slices import SlicedFolder
from verl.protocol.sharding import ShardSpec
from verl.weight_sync.resharding import ModelWeights, Weight
from verl.weight_sync.resharding.model import ENDS, FIRST, LAST, LAYER

Read = Callable[[str, int, int, int], Tensor]
"""Name, axis, low, high -> that part of a Hugging Face weight."""
Template = tuple[Slot, str, tuple[int, ...]]
"""A slot, the stages that have it, and its layers."""


@dataclass(frozen=True)
class Bound:
    """A weight of this rank.

    Args:
        slot: with its final names.
        weights: how the planner describes its Hugging Face weights, one each.
        parameter: Megatron-Core's; a buffer where the slot is fixed.
        expert: whether it is one of a mixture's experts.
    """

    slot: Slot
    weights: tuple[Weight, ...]
    parameter: nn.Parameter
    expert: bool


class WeightTable:
    """What a model is made of, on all ranks and on this one.

    Args:
        templates: of all weights that it is about.
        shapes: Hugging Face name -> shape of every weight.
        chunks: this rank's stages.
        whole: whether the stages have no other weights.
    """

    def __init__(
        self,
        templates: list[Template],
        shapes: Mapping[str, tuple[int, ...]],
        settings: Mapping[str, Any],
        sizes: MegatronSizes,
        groups: ParallelGroups,
        chunks: Iterable[nn.Module],
        *,
        itemsize: int,
        whole: bool = True,
    ):
        self.sizes, self.groups, self.settings = sizes, groups, settings
        self.templates, self.shapes = templates, dict(shapes)
        self._itemsize = itemsize
        of = {slot: self._weights_of(slot, place, where) for slot, place, where in self.templates}
        self.model = ModelWeights(
            tuple(w for slot_weights in of.values() for w in slot_weights), settings["num_layers"]
        )
        self.dtypes = {w.name: torch.float32 for slot, slot_weights in of.items() for w in slot_weights if slot.fixed}
        self.bound = list(self._bind(chunks, whole))
        self.trained = [b for b in self.bound if not b.slot.fixed]
        self._by_name = {name: (b, i) for b in self.bound for i, name in enumerate(b.slot.theirs)}
        unknown = sorted(set(self.shapes) - self._all_names())
        if unknown:
            raise ModelError(
                f"the table of Megatron-Core weights does not know {unknown[0]} of this model",
                fix="Use strategy=fsdp2, which trains any transformers model.",
            )

    def for_weights(
        self, templates: list[Template], shapes: Mapping[str, tuple[int, ...]], chunks: Iterable[nn.Module]
    ) -> WeightTable:
        """A table of other weights of the same stages."""
        return WeightTable(
            templates,
            shapes,
            self.settings,
            self.sizes,
            self.groups,
            chunks,
            itemsize=self._itemsize,
            whole=False,
        )

    # ---- in ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Copy this rank's parts into its parameters."""
        for bound in self.bound:
            self.put(bound, bound.parameter, read)

    def put(self, bound: Bound, target: Tensor, read: Read) -> None:
        """Copy the parts that make up one weight, or a tensor of its shape, into ``target``."""
        parts = [
            read(name, *span)
            for name, weight in zip(bound.slot.theirs, bound.weights)
            for span in self._spans(bound, weight)
        ]
        value = fused(bound.slot.form, parts, self.groups_here)
        if bound.slot.form == VOCABULARY:
            target[value.shape[0] :].zero_()  # rows that only fill up the last rank
            target = target[: value.shape[0]]
        if value.shape != target.shape:
            raise ModelError(
                f"the weight {bound.slot.theirs[0]} has another shape",
                got=tuple(value.shape),
                allowed=str(tuple(target.shape)),
            )
        target.copy_(value)

    def tell_unused(self, folder: SlicedFolder) -> None:
        """Say which layers of a folder are left out: those that predict further tokens stand behind the model's own."""
        layers = (name for name in folder.names() if name.startswith("model.layers."))
        ahead = sorted(name for name in layers if int(name.split(".")[2]) >= self.model.layers)
        if ahead:
            notice(
                f"layers of {folder.path}", f"{len(ahead)} weights of layers that predict further tokens are not used"
            )

    # ---- out ---------------------------------------------------------------------------------------------------

    def piece(self, name: str, tensor_of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """This rank's part of a Hugging Face weight, or of something of its shape; halves as (2, rows, ...).

        Args:
            tensor_of: parameter -> the tensor of its shape that is meant, as the parameter itself.
        """
        bound, number = self._by_name[name]
        tensor = tensor_of(bound.parameter).detach()
        if bound.slot.form == QKV:
            return qkv_part(tensor, number, self.groups_here, self.settings)
        if bound.slot.form == GATED:
            return tensor.chunk(2)[number]
        if bound.slot.form == HALVES:
            return tensor.unflatten(0, (2, -1))
        if bound.slot.form == VOCABULARY:
            _, low, high = self._span(bound, bound.weights[0])
            return tensor[: high - low]
        return tensor

    def box(self, name: str, piece: Tensor) -> tuple[ShardSpec, Tensor]:
        """This rank's part of a Hugging Face weight, or of something of its shape, with its place in it."""
        bound, number = self._by_name[name]
        axis, low, _ = self._span(bound, bound.weights[number])
        if bound.slot.form == HALVES and piece.shape == bound.weights[number].shape:
            piece = piece.flatten(0, 1)  # nothing is cut, so it is saved as every engine has it
            return ShardSpec.of(piece), piece
        return ShardSpec.along(piece, bound.weights[number].shape, axis, low), piece

    @property
    def disk_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight in Hugging Face files, or in an adapter's."""
        return stacked_shapes(self.shapes, self._experts)

    def on_disk(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Complete weights as they are in files: halves one behind the other, experts' factors stacked."""
        collected = Collected(self._experts)
        for name, tensor in tensors:
            yield from collected.add(name, tensor.reshape(self.shapes[name]))

    def as_on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of all at once."""
        return dict(self.on_disk(tensors.items()))

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A weight of a file under the names of the table."""
        if name in self.shapes:
            return {name: tensor}
        numbers = range(self._experts)
        return {part_name(name, n): part_of_stack(name, tensor, n, self._experts) for n in numbers}

    def read_saved(self, saved: StateSection, name: str, axis: int, low: int, high: int) -> Tensor:
        """A `Read` from the weights of a state."""
        part = of_part(name)
        if part is None:
            return part_of(saved, name, axis, low, high)
        stack, expert = part
        stacked = saved.box(stack, [(0, length) for length in saved.shape(stack)])
        return part_of_stack(stack, stacked, expert, self._experts).narrow(axis, low, high - low)

    @property
    def _experts(self) -> int:
        return int(self.settings.get("num_moe_experts") or 0)

    def dtypes_here(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
        """Hugging Face names of this rank's weights, and in which dtype each is exported."""
        for name, (bound, number) in self._by_name.items():
            yield name, self.dtypes.get(bound.weights[number].name, dtype)

    # ---- how weights are cut -----------------------------------------------------------------------------------

    def _weights_of(self, slot: Slot, place: str, where: tuple[int, ...]) -> list[Weight]:
        experts = int(self.settings["num_moe_experts"]) if "{expert}" in slot.theirs[0] else 0
        cut = {COLUMNS: 1, ROWS: 0, QKV: 0, GATED: 0, HALVES: 1, VOCABULARY: 0}.get(slot.form)
        weights = []
        for name, first in zip(slot.theirs, filled(slot, where[0] if where else 0, 0).theirs):
            if first not in self.shapes:
                raise ModelError(f"the model has no weight {first}", fix=suggest(first, self.shapes))
            shape = self.shapes[first]
            if slot.form == HALVES:
                shape = (2, shape[0] // 2, *shape[1:])
            only = where if place == LAYER and len(where) < self.settings["num_layers"] else None
            uneven = slot.form == VOCABULARY
            size = 4 if slot.fixed else self._itemsize
            weight = Weight(name, shape, cut, place=place, experts=experts, itemsize=size, uneven=uneven, only=only)
            weights.append(weight)
        return weights

    def _span(self, bound: Bound, weight: Weight) -> tuple[int, int, int]:
        """Axis, low and high of this rank's part."""
        ranks = self.sizes.expert_tensor if bound.expert else self.sizes.tensor
        place = self._places().expert_tensor if bound.expert else self._places().tensor
        axis, bounds = weight.bounds(ranks)
        piece = int(place[0]) * (len(bounds) - 1) // ranks
        return axis, bounds[piece], bounds[piece + 1]

    def _spans(self, bound: Bound, weight: Weight) -> list[tuple[int, int, int]]:
        """The parts of a Hugging Face weight that this rank has: of halves one of each."""
        axis, low, high = self._span(bound, weight)
        if bound.slot.form != HALVES:
            return [(axis, low, high)]
        rows = weight.shape[1]
        return [(0, low, high), (0, rows + low, rows + high)] if axis else [(0, 0, 2 * rows)]

    @property
    def groups_here(self) -> int:
        """KV groups of this rank."""
        return int(self.settings["num_query_groups"]) // self.sizes.tensor

    def _places(self) -> Any:
        if not hasattr(self, "_here"):
            rank = torch.distributed.get_rank()
            self._here = self.sizes.layout.coordinates().taken(_one(rank))
        return self._here

    # ---- this rank's parameters --------------------------------------------------------------------------------

    def _bind(self, chunks: Iterable[nn.Module], whole: bool) -> Iterator[Bound]:
        named = self._named_parameters(chunks)
        for slot, place, where in self.templates:
            weights = tuple(w for w in self.model.weights if w.name in slot.theirs)
            for layer in where if place == LAYER else (0,):
                for expert in range(max(weights[0].experts, 1)):
                    final = filled(slot, layer, expert)
                    if final.ours in named:
                        yield Bound(final, weights, named.pop(final.ours), weights[0].experts > 0)
        if named and whole:
            raise ModelError(
                f"Megatron-Core's model has a weight that the table does not know: {sorted(named)[0]}",
                fix="Another version of Megatron-Core, or Transformer Engine, may name it otherwise.",
            )

    def _named_parameters(self, chunks: Iterable[nn.Module]) -> dict[str, Any]:
        """Parameters under names with the layer's and the expert's number in the full model."""
        experts = int(self.settings.get("num_moe_experts") or 0) // self.sizes.expert
        first_expert = int(self._places().expert[0]) * experts
        fixed = tuple(slot.ours.rpartition("}")[2] for slot, _, _ in self.templates if slot.fixed)
        parameters: dict[str, Any] = {}
        for chunk in chunks:
            numbers: dict[str, str] = {}
            for local, layer in enumerate(chunk.decoder.layers):  # type: ignore[union-attr,arg-type]
                numbers[str(local)] = str(layer.layer_number - 1)
            buffers = ((name, tensor) for name, tensor in chunk.named_buffers() if name.endswith(fixed))
            for name, parameter in itertools.chain(chunk.named_parameters(), buffers):
                words = name.split(".")
                if name.startswith("decoder.layers."):
                    words[2] = numbers[words[2]]
                if "local_experts" in words:
                    at = words.index("local_experts") + 1
                    words[at] = str(int(words[at]) + first_expert)
                parameters[".".join(words)] = parameter
        # A tied output layer of a later stage is its copy of the embedding.
        if "output_layer.weight" in parameters and not any(
            s.ours == "output_layer.weight" for s, _, _ in self.templates
        ):
            parameters.setdefault("embedding.word_embeddings.weight", parameters.pop("output_layer.weight"))
        return parameters

    def _all_names(self) -> set[str]:
        names: set[str] = set()
        for slot, place, where in self.templates:
            experts = int(self.settings["num_moe_experts"]) if "{expert}" in slot.ours else 1
            for layer in where if place == LAYER else (0,):
                for expert in range(experts):
                    names.update(filled(slot, layer, expert).theirs)
        return names


def part_of(saved: StateSection, name: str, axis: int, low: int, high: int) -> Tensor:
    """A `Read` from a state."""
    bounds = [(low, high) if number == axis else (0, length) for number, length in enumerate(saved.shape(name))]
    return saved.box(name, bounds)


def part_of_halves(saved: StateSection, name: str, axis: int, low: int, high: int) -> Tensor:
    """Rows of a weight, from a state in which its halves are (2, rows, ...) or, as in a file, one behind the other."""
    shape = saved.shape(name)
    if len(shape) < 3:
        return part_of(saved, name, axis, low, high)
    rows, rest = shape[1], [(0, length) for length in shape[2:]]
    if high - low > rows:
        return saved.box(name, [(0, 2), (0, rows), *rest]).flatten(0, 1)
    block, first = divmod(low, rows)
    return saved.box(name, [(block, block + 1), (first, first + high - low), *rest])[0]


def check_given(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    """Raise `ModelError` where a weight is missing, unknown or of another shape."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"the weight {name} is missing", fix=suggest(name, tensors))
        if tuple(tensors[name].shape) != tuple(shape):
            raise ModelError(f"the weight {name} has another shape", got=tuple(tensors[name].shape), allowed=str(shape))
    unknown = sorted(set(tensors) - set(shapes) - {"lm_head.weight"})
    if unknown:
        raise ModelError(f"this model has no weight {unknown[0]}", fix=suggest(unknown[0], shapes))


def model_templates(
    family: Family, settings: Mapping[str, Any], kind: str, tied: bool, shapes: Mapping[str, tuple[int, ...]]
) -> list[Template]:
    """Of all weights of a model.

    Args:
        shapes: Hugging Face name -> shape of every weight.
    """

    def has(slot: Slot, where: tuple[int, ...]) -> bool:
        return not slot.optional or filled(slot, where[0], 0).theirs[0] in shapes

    layered = [(slot, LAYER, where) for slot, where in slots_of(family, settings) if has(slot, where)]
    return [*_ends(kind, tied, shapes), *layered]


def _ends(kind: str, tied: bool, shapes: Mapping[str, Any]) -> Iterator[Template]:
    yield EMBEDDING, ENDS if tied else FIRST, ()
    yield FINAL_NORM, LAST, ()
    if kind == "value":
        yield from ((slot, LAST, ()) for slot in VALUE_HEAD if slot.theirs[0] in shapes)
    elif not tied:
        yield OUTPUT, LAST, ()


def _one(rank: int) -> Any:
    import numpy as np

    return np.array([rank])
