"""The parts of a model that sees: its tower, and the module that joins tower and language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from verl.models.vision.family import VisionFamily


def language_backbone(model: Any) -> Any:
    """The module below the head, which holds tower and language model."""
    return getattr(model, model.base_model_prefix)


def tower_modules(model: Any, family: VisionFamily) -> Iterator[tuple[str, nn.Module]]:
    """The tower and what projects its features, by name in the model."""
    for name in family.tower:
        full = f"{model.base_model_prefix}.{name}"
        yield full, model.get_submodule(full)


def freeze_tower(model: Any, family: VisionFamily) -> None:
    """Train everything but the tower and its projector."""
    for _, module in tower_modules(model, family):
        module.requires_grad_(False)
