"""The parts of a model that sees: its tower, and the module that joins tower and language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from verl.models.vision.family import Picture, VisionFamily

PER_TOKEN = ("merger", "downsample", "projector", "connector")
"""In the names of modules behind the layers, which compute once for each token of the language model."""


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


def tower_flops(model: Any, family: VisionFamily, pictures: Iterable[Picture]) -> float:
    """Floating-point operations of one forward pass over the pictures, in the convention of `verl.models.flops`."""
    per_patch = per_token = 0
    for prefix, tower in tower_modules(model, family):
        for name, module in tower.named_modules(prefix=prefix):
            weights = _matrices(module)
            behind = any(word in name for word in PER_TOKEN)
            per_patch, per_token = per_patch + weights * (not behind), per_token + weights * behind
    vision, total = family.config.vision_config, 0.0
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    width = getattr(vision, "embed_dim", None) or vision.hidden_size
    full = getattr(vision, "fullatt_block_indexes", None)  # the other layers of Qwen2.5-VL attend within windows
    for picture in pictures:
        patches, frames = family.patches(picture)
        context = patches // frames  # attention stays within a frame
        window = context if full is None else min(context, (vision.window_size // vision.patch_size) ** 2)
        seen = layers * context if full is None else len(full) * context + (layers - len(full)) * window
        total += 2.0 * (per_patch * patches + per_token * sum(picture.runs)) + 4.0 * width * seen * patches
    return total


def _matrices(module: nn.Module) -> int:
    """Weights of this very module that are multiplied; embeddings are looked up."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    held = () if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False)
    return sum(weight.numel() for name, weight in held if name.endswith("weight") and weight.dim() > 1)
