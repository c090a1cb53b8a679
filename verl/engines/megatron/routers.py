"""How evenly Megatron-Core's experts are used: numbers of `verl.models.routers`, over tokens that are no padding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
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
        self.routers = []
        self._by_layer: dict[int, Any] = {}
        for chunk in chunks:
            for layer in chunk.decoder.layers:  # type: ignore[union-attr,union-attr]
                if hasattr(layer.mlp, "router"):
                    self._by_layer[layer.layer_number - 1] = layer.mlp.router
        self._mixed = [n for n, mixed in enumerate(settings.get("moe_layer_freq") or ()) if mixed]
        self._experts, self._forward = int(settings.get("num_moe_experts") or 0), forward
        self._seen = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._seen = {layer: torch.zeros(2, self._experts) for layer in self._mixed}
        handles = [
            router.register_forward_hook(lambda module, args, out, layer=layer: self._add(layer, module, args[0], out))
            for layer, router in self._by_layer.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _add(self, layer: int, router: Any, hidden: Tensor, out: tuple[Tensor, Tensor]) -> None:
        real = self._forward.real
        if real is None:  # computed again for the backward pass
            return
        logits = router.gating(hidden).float().flatten(0, -2)[real]
        choices = out[1].view(-1, self._experts)[real].float().sum(0)
        self._seen[layer] += torch.stack((choices, logits.softmax(-1).sum(0))).cpu()
