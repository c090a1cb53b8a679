"""Weights under the names they have on disk, in and out.

In memory transformers fuses some of them (the experts of a mixture); samplers and checkpoints know only the names of
the Hugging Face files, so both directions go through the family's own conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from verl.errors import ModelError, suggest
from verl.models import lora
from verl.models.config import quiet_transformers


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their names in memory; a tied tensor once, under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def export_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under Hugging Face names, detached, in the order of the model.

    Tied embeddings appear once, under the name of the input embedding: whoever receives them ties them itself, as the
    configuration says. The tensors share the model's memory where the family stores them as they are on disk.
    """
    yield from names_on_disk(model, {name: tensor.detach() for name, tensor in named_tensors(model).items()}).items()


@torch.no_grad()
def names_on_disk(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that ``model`` has in memory, under their Hugging Face names.

    An adapter is merged into the weights that it changes: whoever reads them needs to know nothing of it.

    Args:
        model: only its class and configuration count, and where it has an adapter.
        tensors: name in memory -> whole tensor; all of them or a part, such as one layer.
    """
    return revert_weight_conversion(model, lora.merged(model, tensors) if lora.has_adapter(model) else dict(tensors))


def load_weights(model: Any, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy weights under Hugging Face names into a model, all of them or none.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    given = names_in_memory(model, tensors)
    targets = named_tensors(model)
    with torch.no_grad():
        for name, tensor in given.items():
            targets[name].copy_(tensor)


def names_in_memory(
    model: Any, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face names, under the names that they have in ``model``.

    A model with an adapter takes the adapter's tensors alone; its other weights stay.

    Args:
        model: may be one without values (``meta``); so may the tensors, as far as names and shapes go.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape.
    """
    given = dict(tensors)
    targets = named_tensors(model)
    if lora.has_adapter(model):
        return _adapter_in_memory(model, given, targets)
    if not set(targets) <= set(given):
        given = _converted(model, given)
    _check(targets, given)
    return {name: given[name] for name in targets}


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _converted(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``given`` under the names in memory: transformers converts while loading, so it loads a second model."""
    absent = sorted({name for name, _ in export_weights(model)} - set(given))
    if absent:
        raise ModelError(f"{len(absent)} weights are missing, the first is {absent[0]}", fix=suggest(absent[0], given))
    device = "meta" if all(tensor.is_meta for tensor in given.values()) else None
    with quiet_transformers():
        fresh = type(model).from_pretrained(
            None, config=model.config, state_dict=given, dtype=model.dtype, device_map=device
        )
    return {name: tensor.detach() for name, tensor in named_tensors(fresh).items()}


def _adapter_in_memory(
    model: Any, given: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    names = lora.adapter_names(model)
    if not lora.is_adapter(given):
        raise ModelError(
            "a model with a LoRA adapter takes over adapters, and these are weights of a whole model",
            fix="Set lora_rank=0 to train all weights, or load the adapter's checkpoint.",
        )
    _check({disk: targets[name] for name, disk in names.items()}, given)
    return {name: given[disk] for name, disk in names.items()}


def _check(targets: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        if name not in given:
            raise ModelError(f"the weight {name} is missing", fix=suggest(name, given))
        if given[name].shape != target.shape:
            raise ModelError(
                f"the weight {name} has another shape", got=tuple(given[name].shape), allowed=str(tuple(target.shape))
            )
    unknown = sorted(set(given) - set(targets) - {"lm_head.weight"})
    if unknown:
        raise ModelError(f"this model has no weight {unknown[0]}", fix=suggest(unknown[0], targets))
