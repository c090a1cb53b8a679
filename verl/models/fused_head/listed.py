"""Statistics that need all logits of a token at once, such as its most likely tokens, for a few tokens at a time.

The backward pass computes the logits again, so that memory is that of some tokens in both (Chen et al. 2016, arXiv
1604.06174).

Shapes: N tokens, n of them at a time, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from verl.device import AutogradContext
from verl.models.fused_head.one_pass import NUMBERS
from verl.models.fused_head.tiled import GradientSums, Shape

OfLogits = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""(n, V) float32 logits and which tokens they are of -> statistics, each (n,) or (n, K)."""


class ListedStatistics(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None -> the statistics of all tokens, each (N,) or (N, K)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, of_logits: OfLogits
    ) -> tuple[Tensor, ...]:
        narrow = weight.to(hidden.dtype)
        parts = [
            of_logits(_logits(_product(hidden[tokens], narrow, bias), shape), tokens)
            for tokens in _chunks(len(hidden), len(weight), shape)
        ]
        statistics = tuple(map(torch.cat, zip(*parts)))
        ctx.mark_non_differentiable(*(values for values in statistics if not values.is_floating_point()))
        ctx.save_for_backward(hidden, weight, bias)
        ctx.shape, ctx.of_logits = shape, of_logits
        return statistics

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        narrow, words, chunks = weight.to(hidden.dtype), slice(None), [*_chunks(len(hidden), len(weight), ctx.shape)]
        sums = GradientSums(hidden, weight, bias, ctx.needs_input_grad[:3], len(chunks))
        for tokens in chunks:
            product = _product(hidden[tokens], narrow, bias).requires_grad_()
            with torch.enable_grad():
                statistics = ctx.of_logits(_logits(product, ctx.shape), tokens)
            pairs = [(values, grad[tokens]) for values, grad in zip(statistics, grads) if values.requires_grad]
            outputs, of_outputs = map(list, zip(*pairs))
            (dz,) = torch.autograd.grad(outputs, product, of_outputs)
            sums.add(dz, tokens, words, 1.0)
        return *sums.of_inputs(), None, None


def _chunks(num_tokens: int, vocabulary: int, shape: Shape) -> Iterator[slice]:
    """At least one, so that no tokens have statistics of the right shapes."""
    rows = max(1, (shape.tile or NUMBERS) // vocabulary)
    for first in range(0, max(1, num_tokens), rows):
        yield slice(first, min(first + rows, num_tokens))


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(n, V) float32, rounded as the head itself would round."""
    product = (hidden @ weight.t()).float()
    return product if bias is None else product + bias


def _logits(product: Tensor, shape: Shape) -> Tensor:
    if shape.softcap is None:
        return product * shape.factor
    return torch.tanh(product * (shape.scale / shape.softcap)) * (shape.softcap / shape.temperature)
