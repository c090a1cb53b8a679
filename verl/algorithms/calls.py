"""How a function that a user wrote is called: with what its signature asks for, and by the name a message can use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def accepted_inputs(function: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``inputs`` that the function's signature takes by keyword; all of it with ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(inputs)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in inputs.items() if name in names}


def names_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether the signature has a parameter of that name (``**kwargs`` names nothing)."""
    return name in inspect.signature(function).parameters


def function_place(function: Callable[..., Any]) -> str:
    """How messages call a user's function: its name and where it stands."""
    named = inspect.unwrap(function)
    return f"{named.__module__}.{named.__qualname__}" if inspect.isroutine(named) else repr(function)


def check_shapes(tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` unless all tensors have one shape (rows, response tokens)."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the tensors must have one shape (rows, response tokens); got {listed}")
