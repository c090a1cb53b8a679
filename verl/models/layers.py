"""Where a model of transformers keeps its layers, as the family itself says."""

from __future__ import annotations

from typing import Any

from torch import nn


def transformer_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers by name, in their order: what the family says must not be split; empty where it says nothing."""
    kinds: Any = set(model._no_split_modules or ())  # type: ignore[arg-type]  # a set of names on every model of theirs

    def is_layer(module: nn.Module) -> bool:  # FSDP2 derives classes of its own from those of a family
        return any(kind.__name__ in kinds for kind in type(module).__mro__)

    return [(name, module) for name, module in model.named_modules() if is_layer(module)]
