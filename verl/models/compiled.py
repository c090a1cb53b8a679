"""Transformer layers compiled with `torch.compile`: what is left between matrix products becomes a few kernels.

Attention stays outside of the compiled graph, so that packed rows of any length run on one compilation.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from verl.metrics import notice

WORTHWHILE = 500_000_000
"""Parameters from which a GPU gains more over a run than the minute that compiling takes."""
BACKEND = "inductor"


def wants_compiling(setting: bool | None, device: str, num_parameters: int) -> bool:
    """The setting, where null is: on a GPU, for models that are worth it."""
    return device == "cuda" and num_parameters >= WORTHWHILE if setting is None else setting


def compile_layers(model: nn.Module) -> int:
    """Compile every transformer layer in place, at its first call; returns how many there are.

    Names, parameters and state stay as they are. Lengths are symbols in the compiled code from the start.
    """
    kinds: Any = set(model._no_split_modules or ())  # type: ignore[arg-type]
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    for layer in layers:
        layer.compile(dynamic=True, backend=BACKEND)
    if layers:
        notice("use_torch_compile", f"the {len(layers)} layers are compiled at the first step, which takes a minute")
    return len(layers)
