"""A meta model with memory only for what no file holds: new heads, adapters, and the buffers that a family computes.

Engines that share a model among processes learn from it what is new in every process, bit for bit as if it had been
loaded whole, without loading it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.errors import ModelError
from verl.models.weights import loose_tensors, named_tensors

Make = Callable[[str, nn.Parameter], nn.Parameter]


@torch.no_grad()
def hollow(model: PreTrainedModel, new: Container[str]) -> None:
    """Give a model without values (``meta``) undefined values where it is ``new``, and zeros without memory elsewhere.

    Args:
        new: names of parameters.

    Raises:
        ModelError: the family does not say how a buffer of its own is computed.
    """
    unknown = compute_loose(model)
    if unknown:
        raise ModelError(
            f"{type(model).__name__} does not say how to compute {unknown[0]}, so its values are undefined",
            fix="Its code must set it in _init_weights, or keep it in the files (persistent=True).",
        )

    def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name in new:
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        else:
            value = torch.zeros(1, dtype=parameter.dtype).as_strided(parameter.shape, [0] * parameter.dim())
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    replace_parameters(model, make)


def new_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a hollow model has memory for, by name in memory: parameters alone."""
    parameters = {
        name: tensor.detach() for name, tensor in named_tensors(model).items() if isinstance(tensor, nn.Parameter)
    }
    return {name: tensor for name, tensor in parameters.items() if any(tensor.stride())}


def replace_parameters(model: nn.Module, make: Make) -> None:
    """Put another parameter into the place of each one; those that are tied stay so.

    Args:
        make: name, parameter -> the one to take its place.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # the old one stays alive: its id is not reused
                    made[id(parameter)] = parameter, make(f"{prefix}.{name}".lstrip("."), parameter)
                module._parameters[name] = made[id(parameter)][1]


@torch.no_grad()
def compute_loose(model: PreTrainedModel) -> list[str]:
    """Give a model without values the buffers that its family computes; those of the files are zeros.

    Returns:
        Names of what the family does not compute, so that its values are unknown.
    """
    stored, empty = set(model.state_dict()), list(_empty(model))
    for path, module, tensor in empty:
        value = torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
        setattr(module, path.rpartition(".")[2], value)
    # A tower is a model inside the model, and its class alone knows its buffers: the innermost model computes them.
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    of_module = {id(module): part for part in models for module in part.modules()}
    with torch.random.fork_rng(devices=[]):
        for module in {id(module): module for _, module, _ in empty}.values():
            of_module.get(id(module), model)._init_weights(module)
    return [
        path
        for path, _, tensor in loose_tensors(model)
        if path.lstrip(".") not in stored and tensor.is_floating_point() and bool(torch.isnan(tensor).any())
    ]


def _empty(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    return ((path, module, tensor) for path, module, tensor in loose_tensors(model) if tensor.is_meta)
