"""Weights under the names they have on disk, in and out.

In memory transformers fuses some of them (the experts of a mixture); samplers and checkpoints know only the names of
the Hugging Face files, so both directions go through the family's own conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.core_model_loading import revert_weight_conversion

from verl.errors import ModelError, suggest
from verl.models import lora
from verl.models.config import quiet_transformers
from verl.models.nf4 import is_quantized, nf4_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a layer in a name."""


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their names in memory; a tied tensor once, under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def loose_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Buffers and tensors that a module keeps as plain attributes (rotary frequencies): every rank has them whole."""
    for prefix, module in model.named_modules():
        for name, value in [*module._buffers.items(), *vars(module).items()]:
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", module, value


def export_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under Hugging Face names, detached, in the order of the model.

    Tied embeddings appear once, under the name of the input embedding: the receiver ties them, as the
    configuration says. The tensors share the model's memory where the family stores them as they are on disk. Weights
    in 4 bits are restored, one layer of the model at a time.
    """
    if is_quantized(model):
        yield from _restored(model)
        return
    yield from names_on_disk(model, {name: tensor.detach() for name, tensor in named_tensors(model).items()}).items()


def _restored(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """As `export_weights`, of a model with weights in 4 bits."""
    layers = dict(nf4_layers(model))
    units: dict[str, dict[str, torch.Tensor | None]] = {}
    for name, tensor in [*named_tensors(model).items(), *dict.fromkeys(layers).items()]:
        number = _LAYER.search(name)
        units.setdefault(name[: number.end()] if number else "", {})[name] = tensor
    for unit in units.values():
        weights = {name: layers[name].restored() if t is None else t.detach() for name, t in unit.items()}
        yield from names_on_disk(model, weights).items()
        del weights  # before the next layer is restored


@torch.no_grad()
def names_on_disk(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that ``model`` has in memory, under their Hugging Face names.

    An adapter is merged into the weights that it changes: a reader does not see it.

    Args:
        model: only its class and configuration count, and where it has an adapter.
        tensors: name in memory -> full tensor; all of them or a part, such as one layer.
    """
    return revert_weight_conversion(
        model, lora.merge_adapter(model, tensors) if lora.has_adapter(model) else dict(tensors)
    )


def views_on_disk(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """The memory of each weight under its Hugging Face name: what is written there is in the model.

    Returns:
        Name -> a view of a parameter or buffer; None if no tensor in memory holds all of a weight.
    """
    tensors = named_tensors(model)
    places = places_on_disk(model, tensors)
    if places is None or not all(tensor.is_contiguous() for tensor in tensors.values()):
        return None
    views = {}
    for name, at in places.items():
        owner = tensors[at.owner].detach()
        views[name] = owner.as_strided(at.shape, at.strides, owner.storage_offset() + at.offset)
    return views


@dataclass(frozen=True)
class WeightPlace:
    """A weight of a file as a view of one of the model's, if that is contiguous: as for `torch.as_strided`."""

    owner: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def places_on_disk(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, WeightPlace] | None:
    """Hugging Face name -> its place, for all that ``tensors`` hold; no values are looked at and none are copied.

    Families that fuse weights only stack, join and transpose them, so each weight of a file is a strided part of one
    tensor. Converting tensors without memory, where every copy is a view instead, shows which part.

    Args:
        model: only its class and configuration count.
        tensors: name in memory, without an adapter -> a tensor of the weight's shape.

    Returns:
        None if no tensor in memory holds all of a weight, or values are in no file.
    """
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        number = _LAYER.search(name)
        groups.setdefault(name[: number.end()] if number else "", {})[name] = tensor.shape
    place_of: dict[str, WeightPlace] = {}
    by_layer_shape: dict[Any, dict[str, WeightPlace] | None] = {}
    for prefix, shapes in groups.items():
        layer, template = prefix.rpartition(".")[2], f"{prefix.rpartition('.')[0]}.{{}}"
        alike = (template, *((name.removeprefix(prefix), shape) for name, shape in shapes.items()))
        if alike not in by_layer_shape:
            by_layer_shape[alike] = _places(model, shapes, prefix)
        places = by_layer_shape[alike]
        if places is None:
            return None
        for other, place in places.items():
            if layer and "{}" not in other:
                return None  # layers are numbered otherwise in files
            place_of[other.replace("{}", layer)] = replace(place, owner=place.owner.replace("{}", layer))
    return place_of


@torch.no_grad()
def _places(model: PreTrainedModel, shapes: Mapping[str, torch.Size], prefix: str) -> dict[str, WeightPlace] | None:
    """As `places_on_disk`, with ``{}`` for the number at the end of ``prefix`` in all names."""
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in blank.items()}
    with _ViewsForCopies():
        parts = revert_weight_conversion(model, dict(blank))
    if sum(part.numel() for part in parts.values()) != sum(tensor.numel() for tensor in blank.values()):
        return None
    places = {}
    layer = prefix.rpartition(".")[2]

    def template(name: str) -> str:
        return name.replace(f".{layer}.", ".{}.", 1) if layer else name

    for name, part in parts.items():
        owner = owners.get(part.untyped_storage()._cdata)
        if owner is None or not part.numel():
            return None
        place = WeightPlace(template(owner), tuple(part.shape), tuple(part.stride()), int(part.storage_offset()))
        places[template(name)] = place
    return places


class _ViewsForCopies(TorchDispatchMode):
    """Within the block a copy is its source, so that strides and offset say where it came from."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def load_weights(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy weights under Hugging Face names into a model, all of them or none.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    converted = names_in_memory(model, tensors)
    targets = named_tensors(model)
    with torch.no_grad():
        for name, tensor in converted.items():
            targets[name].copy_(tensor)


def names_in_memory(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face names, under the names that they have in ``model``.

    A model with an adapter takes the adapter's tensors alone; its other weights stay.

    Args:
        model: may be one without values (``meta``); so may the tensors, as far as names and shapes go.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    weights = dict(tensors)
    targets = named_tensors(model)
    if lora.has_adapter(model):
        return _adapter_in_memory(model, weights, targets)
    if not set(targets) <= set(weights):
        weights = _converted(model, weights)
    _check(targets, weights)
    return {name: weights[name] for name in targets}


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; tied ones count once, those in 4 bits as the numbers that they stand for."""
    in_4_bits = sum(layer.in_features * layer.out_features for _, layer in nf4_layers(model))
    return in_4_bits + sum(parameter.numel() for parameter in model.parameters())


def _converted(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state`` under the names in memory: transformers converts while loading, which needs a second model."""
    absent = sorted({name for name, _ in export_weights(model)} - set(state))
    if absent:
        raise ModelError(f"{len(absent)} weights are missing, the first is {absent[0]}", fix=suggest(absent[0], state))
    device = "meta" if all(tensor.is_meta for tensor in state.values()) else None
    with quiet_transformers():
        fresh = type(model).from_pretrained(
            None, config=model.config, state_dict=state, dtype=model.dtype, device_map=device
        )
    return {name: tensor.detach() for name, tensor in named_tensors(fresh).items()}


def _adapter_in_memory(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    names = lora.adapter_names(model)
    if not lora.is_adapter(tensors):
        raise ModelError(
            "a model with a LoRA adapter takes over adapters, and these are weights of a whole model",
            fix="Set lora_rank=0 to train all weights, or load the adapter's checkpoint.",
        )
    _check({disk: targets[name] for name, disk in names.items()}, tensors)
    return {name: tensors[disk] for name, disk in names.items()}


def _check(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        if name not in tensors:
            raise ModelError(f"the weight {name} is missing", fix=suggest(name, tensors))
        if tensors[name].shape != target.shape:
            raise ModelError(
                f"the weight {name} has another shape", got=tuple(tensors[name].shape), allowed=str(tuple(target.shape))
            )
    unknown = sorted(set(tensors) - set(targets) - {"lm_head.weight"})
    if unknown:
        raise ModelError(f"this model has no weight {unknown[0]}", fix=suggest(unknown[0], targets))
