"""How evenly the routers of TorchTitan's mixtures use their experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.engines.torchtitan.configuration import has_experts
from verl.engines.torchtitan.model import TitanModel
from verl.models.routers import RouterStatistics


def routers_of(model: TitanModel) -> dict[int, nn.Module]:
    """Number of a layer -> its router, of the layers that this rank has."""
    layers: Any = model.decoder.layers
    return {int(number): layer.moe.router for number, layer in layers.items() if getattr(layer, "moe_enabled", False)}


class TitanRouters(RouterStatistics):
    """As `RouterStatistics`; summed over ranks they are those of the model.

    Args:
        model: a `TitanModel`.
    """

    def __init__(self, model: TitanModel):
        self.routers: dict[int, Any] = dict(routers_of(model))
        experts = {n for n in range(model.config.num_hidden_layers) if has_experts(model.config, n)}
        self._zeros = {layer: torch.zeros(2, model.config.num_experts) for layer in sorted(experts)}
        self._seen: dict[int, Tensor] = {}

    def _none_seen(self) -> dict[int, Tensor]:
        return dict(self._zeros)  # also of the layers of other stages

    @torch.no_grad()
    def _count(self, layer: int, module: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        if not module.training:
            return
        # A rank's own tokens: they are cut where experts are shared, and alike on tensor-parallel ranks elsewhere.
        top_experts, probabilities = (x.to_local() if isinstance(x, DTensor) else x for x in out[1:])
        experts = module.num_experts
        choices = torch.bincount(top_experts.flatten(), minlength=experts).float()
        counted = torch.stack((choices, probabilities.flatten(0, -2).float().sum(0)))
        self._seen[layer] = self._seen[layer] + counted.cpu()
