"""Megatron-Core's routers: how evenly they use their experts, and the loss that keeps their logits small.

Both count tokens that are no padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.distributed import Ranks
from verl.engines.megatron.forward import StageForward
from verl.engines.megatron.parallel import SECTION, MegatronSizes
from verl.metrics import MetricSet, notice
from verl.models.routers import RouterStatistics, Sum


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
        self._seen, self._squares = {}, torch.zeros(2)

    def _none_seen(self) -> dict[int, Tensor]:
        self._squares = torch.zeros(2)
        return {layer: torch.zeros(2, self._experts) for layer in self._mixed}

    @torch.no_grad()
    def _count(self, layer: int, module: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        real = self._forward.real
        if real is None:  # computed again for the backward pass
            return
        logits = module.gating(inputs[0]).float().flatten(0, -2)[real]
        choices = out[1].view(-1, self._experts)[real].float().sum(0)
        self._seen[layer] += torch.stack((choices, logits.softmax(-1).sum(0))).cpu()
        if self._forward.masks:
            squares = logits.logsumexp(-1).square()
            self._squares += torch.stack((squares.sum(), squares.new_tensor(float(len(squares))))).cpu()

    def metrics(self, sum_over_ranks: Sum = lambda x: x) -> MetricSet:
        """As those of every engine; beside a z-loss ``moe/z_loss``, its mean over tokens and layers before c."""
        metrics = super().metrics(sum_over_ranks)
        if self._forward.masks:
            total, count = sum_over_ranks(self._squares).tolist()
            metrics.add("moe/z_loss", total / count)
        return metrics


class RouterLoss:
    """The z-loss: c times the mean over tokens of logsumexp(logits)^2, summed over layers.

    Zoph et al. 2022, arXiv 2202.08906, equation 5. Megatron-Core adds its gradient where the logits are. The mean is
    over the tokens of a whole mini-batch, so it is the same in every layout and however it is cut into micro-batches.

    Args:
        stages: `StageForward`, which says which tokens are padding.
    """

    def __init__(self, chunks: list[nn.Module], sizes: MegatronSizes, stages: StageForward):
        config: Any = chunks[0].config
        self._config, self._sizes = config, sizes
        self.coefficient = float(config.moe_z_loss_coeff or 0.0)
        if self.coefficient and not config.num_moe_experts:
            notice(f"{SECTION}.override_mcore_model_config.moe_z_loss_coeff", "has no effect: the model has no experts")
            self.coefficient = 0.0
        stages.masks = bool(self.coefficient)

    def spread(self, tokens: int, ranks: Ranks, peers: int) -> None:
        """Set the weight of one token for the passes of a mini-batch. Collective.

        Args:
            tokens: of this rank's rows.
            peers: ranks that have the same rows.
        """
        if not self.coefficient:
            return
        # Every data-parallel rank needs the count of all, because all tokens weigh the same.
        every = float(ranks.sum(torch.tensor(float(tokens)))) / peers
        # Megatron-Core divides by the ranks that it knows to share the tokens, and multiplies by their number.
        sharing = self._sizes.tensor * self._config.context_parallel_size
        self._config.moe_z_loss_coeff = self.coefficient * sharing / every
