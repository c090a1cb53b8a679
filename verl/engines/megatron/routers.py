"""How evenly Megatron-Core's experts are used: numbers of `verl.models.routers`, over tokens that are no padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.engines.megatron.forward import StageForward
from verl.models.routers import RouterStatistics


class StageRouters(RouterStatistics):
    """Counts on the ranks that have a layer; summed over ranks they are those of the model.

    Args:
        chunks: this rank's stages.
        settings: of the family; they say which layers have experts.
        forward: runs the stages, and knows which tokens are real.
    """

    def __init__(self, chunks: Iterable[nn.Module], settings: Mapping[str, Any], forward: StageForward):
        self.routers: dict[int, Any] = {}
        for chunk in chunks:
            for layer in chunk.decoder.layers:  # type: ignore[union-attr,union-attr]
                if hasattr(layer.mlp, "router"):
                    self.routers[layer.layer_number - 1] = layer.mlp.router
        self._mixed = [n for n, mixed in enumerate(settings.get("moe_layer_freq") or ()) if mixed]
        self._experts, self._forward = int(settings.get("num_moe_experts") or 0), forward
        self._seen = {}

    def _none_seen(self) -> dict[int, Tensor]:
        return {layer: torch.zeros(2, self._experts) for layer in self._mixed}

    @torch.no_grad()
    def _count(self, layer: int, module: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        real = self._forward.real
        if real is None:  # computed again for the backward pass
            return
        logits = module.gating(inputs[0]).float().flatten(0, -2)[real]
        choices = out[1].view(-1, self._experts)[real].float().sum(0)
        self._seen[layer] += torch.stack((choices, logits.softmax(-1).sum(0))).cpu()
