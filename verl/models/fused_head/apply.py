"""The fused head in the place of a model's own: inside the model's forward pass, so that sharded weights are at hand.

While a `FusedHead` is open, the model's head computes statistics of its logits and returns next to nothing in
their place. What a family does behind its head (a factor, soft-capping) happens in the tiles instead.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.models.fused_head.listed import ListedStatistics, OfLogits
from verl.models.fused_head.one_pass import OnePassHead
from verl.models.fused_head.tiled import Shape, TokenStatistics

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BACKENDS = {
    "torch": "verl.models.fused_head.tiled:TokenStatistics",
    "triton": "verl.models.fused_head.triton_backend:TritonStatistics",
}
OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")
PROBE_TOKENS = 6
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
LOW_PRECISION_TOLERANCE = 0.05


@dataclass(frozen=True)
class FusedHead:
    """How the head of one model is fused.

    Args:
        function: the autograd function of the backend.
        shape: what the family does behind the head.
    """

    function: Any
    shape: Shape

    @classmethod
    def of(cls, model: PreTrainedModel, backend: str = "torch") -> FusedHead:
        module, _, name = BACKENDS[backend].partition(":")
        return cls(getattr(importlib.import_module(module), name), logit_shape(model.config.get_text_config()))

    @contextlib.contextmanager
    def instead_of(
        self,
        head: nn.Module,
        positions: Tensor,
        labels: Tensor,
        temperature: float,
        outputs: tuple[str, ...],
        slopes: Tensor | None = None,
        of_logits: OfLogits | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Within the block a call of ``head`` fills the dictionary that this gives: name -> (N,) float32,
        or (N, K) of several tokens, whose ids are int32.

        Args:
            positions: (N,) of the flattened tokens. labels: (N,) what they predict.
            slopes: (N,) d loss / d log_probs up to one factor, where it is known beforehand.
            of_logits: computes the outputs, in their order, where one of them needs all logits of a token.
        """
        computed: dict[str, Tensor] = {}
        shape = replace(self.shape, temperature=temperature)
        extras = ("entropy" in outputs, "sum_pi_squared" in outputs)

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            selected = hidden.flatten(0, -2).index_select(0, positions)
            weight, bias = head_weight(head)
            dtype = _compute_dtype(selected)
            if of_logits is not None:
                listed = ListedStatistics.apply(selected.to(dtype), weight, bias, shape, of_logits)
                computed.update(zip(outputs, listed))
            elif outputs == ("log_probs",) and self._sweeps(selected, weight, bias, slopes):
                expected = selected.new_ones(len(labels), dtype=torch.float32) if slopes is None else slopes
                computed["log_probs"] = sweep(selected.to(dtype), weight, bias, labels, expected, shape)
            else:
                # `OUTPUTS`; those that ``extras`` leaves out have any values.
                statistics = self.function.apply(selected.to(dtype), weight, bias, labels, shape, extras)
                computed.update({name: x for name, x in zip(OUTPUTS, statistics) if name in outputs and x is not None})
            # Sharded engines follow the gradient through what a model returns, so something of it has to go there.
            return selected[:, :1].unsqueeze(0) * 0.0

        head.forward = forward  # type: ignore[method-assign]
        try:
            yield computed
        finally:
            del head.forward

    def _sweeps(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, slopes: Tensor | None) -> bool:
        """Whether the gradient is known in the forward pass: its slopes are, or only hidden states have one."""
        if self.function is not TokenStatistics or self.shape.softcap is not None:
            return False
        frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
        return torch.is_grad_enabled() and hidden.requires_grad and (frozen or slopes is not None)


def sweep(*arguments: Any) -> Tensor:
    """As `OnePassHead`."""
    return OnePassHead.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def head_weight(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (V, H) and bias of a linear head, an adapter on it added."""
    layer: Any = head
    if not hasattr(layer, "get_base_layer"):
        return layer.weight, layer.bias
    base = layer.get_base_layer()
    weight = base.weight
    for name in () if layer.disable_adapters else layer.active_adapters:
        if name in layer.lora_A:
            weight = weight + layer.scaling[name] * (layer.lora_B[name].weight @ layer.lora_A[name].weight)
    return weight, base.bias


def logit_shape(config: PretrainedConfig) -> Shape:
    """What families do with their logits, as their configurations name it."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Shape(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def fusable(model: PreTrainedModel, head: nn.Module, fused: FusedHead, device: torch.device | str) -> bool:
    """Whether the fused head gives this model's own log-probs, tried out on a few tokens. Collective when sharded."""
    if not isinstance(head, nn.Linear) and not hasattr(head, "get_base_layer"):
        return False
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    trains = model.training
    model.eval()
    try:
        z = model(input_ids=ids, attention_mask=None, use_cache=False).logits[0].float()
        everywhere = torch.arange(PROBE_TOKENS, device=device)
        with fused.instead_of(head, everywhere, ids[0], 1.0, OUTPUTS[:2]) as computed:
            model(input_ids=ids, attention_mask=None, use_cache=False)
    finally:
        model.train(trains)
    expected = z.log_softmax(-1).gather(1, ids[0][:, None])[:, 0]
    tolerance = TOLERANCE.get(
        _compute_dtype(z) if model.dtype == torch.float32 else model.dtype, LOW_PRECISION_TOLERANCE
    )
    return bool((computed["log_probs"] - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1.0))


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """What a linear layer would compute in."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
