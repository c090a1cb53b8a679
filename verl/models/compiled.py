"""Transformer layers compiled with `torch.compile`: what is left between matrix products becomes a few kernels.

Attention stays outside of the compiled graph, so that packed rows of any length run on one compilation. So does what
sharded engines do around a layer (gathering its weights, freeing them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verl.metrics import notice
from verl.models.layers import transformer_layers

WORTHWHILE = 500_000_000
"""Parameters from which a GPU gains more over a run than the minute that compiling takes."""
BACKEND: Any = "inductor"


def wants_compiling(setting: bool | None, device: str, num_parameters: int) -> bool:
    """The setting, where null is: on a GPU, for models that are worth it."""
    return device == "cuda" and num_parameters >= WORTHWHILE if setting is None else setting


def compile_layers(model: nn.Module) -> int:
    """Compile every transformer layer in place, at its first call; returns how many there are.

    Names, parameters and state stay as they are. Lengths are symbols in the compiled code from the start.
    """
    layers = [layer for _, layer in transformer_layers(model)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)  # type: ignore[method-assign]
    if layers:
        notice("use_torch_compile", f"the {len(layers)} layers are compiled at the first step, which takes a minute")
    else:
        notice("use_torch_compile", f"has no effect: {type(model).__name__} names no layers that could be compiled")
    return len(layers)
