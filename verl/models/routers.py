"""How evenly a mixture of experts uses its experts, seen during training passes.

The balance of one layer is E times the sum over experts of (share of choices) x (mean probability): 1 where all E are
used alike, up to E where one takes everything (Fedus et al. 2021, arXiv 2101.03961, equation 4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.metrics import MetricSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sum = Callable[[Tensor], Tensor]


def router_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The routers of a model, as its family itself names them; none in a dense model."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    if kind is None:
        return []
    # A kind that is every linear layer (Jamba in transformers 5.17) has a name besides.
    name = getattr(recorder, "layer_name", None) if kind is nn.Linear else None
    return [m for full, m in model.named_modules() if isinstance(m, kind) and (name is None or name in full)]


class RouterStatistics:
    """Counts what the routers of a model choose while `watching`.

    Args:
        model: any model; of a dense one nothing is counted.

    Attributes:
        routers: number of its layer -> router, those that are watched.
    """

    def __init__(self, model: PreTrainedModel):
        # A plain linear layer gives logits alone: the choice is made elsewhere, and not seen here.
        choosing = [router for router in router_modules(model) if not isinstance(router, nn.Linear)]
        self.routers: dict[int, Any] = dict(enumerate(choosing))
        self._seen: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block every call of a router is counted, from zero."""
        self._seen = self._none_seen()
        handles = [
            router.register_forward_hook(
                lambda module, inputs, out, layer=layer: self._count(layer, module, inputs, out)
            )
            for layer, router in self.routers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _none_seen(self) -> dict[int, Tensor]:
        """Layer -> (2, E) zeros, of the layers that count even where nothing of them is seen here."""
        return {}

    @torch.no_grad()
    def _count(self, layer: int, module: Any, inputs: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        """Add one call of a router to what is seen of its layer."""
        if not module.training:
            return  # the same model as its own reference policy
        logits, _, top_experts = out
        experts = logits.shape[-1]
        probabilities = logits.detach().float().flatten(0, -2).softmax(-1).sum(0)
        choices = torch.bincount(top_experts.flatten(), minlength=experts).float()
        counted = torch.stack((choices, probabilities))
        self._seen[layer] = self._seen[layer] + counted if layer in self._seen else counted

    def metrics(self, sum_over_ranks: Sum = lambda x: x) -> MetricSet:
        """``moe/load_balance`` (mean over layers) and ``moe/max_load`` (the busiest expert's share times E).

        Args:
            sum_over_ranks: adds up a tensor over the data-parallel ranks; every rank calls it equally often.
        """
        metrics = MetricSet()
        if not self._seen:
            return metrics
        seen = sum_over_ranks(torch.stack([self._seen[layer] for layer in sorted(self._seen)]))
        shares = seen / seen.sum(-1, keepdim=True)
        experts = shares.shape[-1]
        metrics.add("moe/load_balance", float((experts * shares[:, 0] * shares[:, 1]).sum(-1).mean()))
        metrics.add("moe/max_load", float(experts * shares[:, 0].max()))
        return metrics
