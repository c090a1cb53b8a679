"""Log-probabilities whose gradient is computed in the forward pass, with each logit computed once.

The tiles of `tiled` compute every logit twice, because a gradient needs the normaliser of the full vocabulary. Here
the logits of a few tokens over the full vocabulary are held at once, so that their gradient follows on the spot (as
in Hsu et al. 2024, arXiv 2410.10989): three matrix products as with whole logits, where tiles take four. The gradient
of the hidden states is exact whatever the loss turns out to be, since each token's is scaled by its own slope later;
that of the weight is a sum over tokens and needs the slopes beforehand. If the guess was wrong it is computed again,
in tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.device import AutogradContext
from verl.models.fused_head.tiled import Shape, Statistics, Tile, add_product, gradients

NUMBERS = 1 << 26
"""Logits that are held at once: a few hundred tokens of a large vocabulary."""
CACHED = 1 << 19
"""Logits that are turned into their gradient at once, so that they stay in a cache meanwhile."""
TOLERANCE = 1e-6
"""Largest error of guessed slopes, in parts of the largest slope."""


class OnePassHead(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None, labels (N,), slopes (N,) -> log_probs (N,) float32.

    Args (of ``apply``):
        slopes: d loss / d log_probs up to one factor, as it is expected.
        shape: without soft-capping.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        slopes: Tensor,
        shape: Shape,
    ) -> Tensor:
        assert shape.softcap is None, "soft-capped logits have a slope of their own"
        needs = ctx.needs_input_grad
        log_probs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs[0] else None
        rows = max(1, (shape.tile or NUMBERS) // len(weight))
        dtype = weight.dtype if rows >= len(labels) else torch.float32
        to_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if needs[1] else None
        to_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if needs[2] else None
        tile, everything = Tile(hidden, weight, bias, shape), slice(0, len(weight))
        for first in range(0, len(labels), rows):
            tokens = slice(first, min(first + rows, len(labels)))
            z, _ = tile.logits(tokens, everything)
            _to_gradient(z, labels[tokens], log_probs[tokens])
            narrow = z.to(hidden.dtype)
            weighted = hidden[tokens] * slopes[tokens, None].to(hidden.dtype)
            if to_hidden is not None:
                add_product(to_hidden[tokens], narrow, weight.to(hidden.dtype), shape.factor)
            if to_weight is not None:
                add_product(to_weight, narrow.t(), weighted, shape.factor)
            if to_bias is not None:
                to_bias += (slopes[tokens] @ z) * shape.factor
        ctx.save_for_backward(hidden, weight, bias, labels, slopes, log_probs, to_hidden, to_weight, to_bias)
        ctx.shape = shape
        return log_probs

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, slopes, log_probs, to_hidden, to_weight, to_bias = ctx.saved_tensors
        grad = grads[0]
        if to_hidden is not None:
            to_hidden = (to_hidden * grad[:, None]).to(hidden.dtype)
        if to_weight is None and to_bias is None:
            return to_hidden, None, None, None, None, None
        factor = _common_factor(grad, slopes)
        if factor is None:
            tile = Tile(hidden, weight, bias, ctx.shape)
            lse = _normalisers(tile, labels, log_probs)
            statistics = Statistics(lse, torch.zeros_like(lse))
            again = gradients(tile, labels, statistics, grads, (False, *ctx.needs_input_grad[1:3]))
            return to_hidden, *again[1:], None, None, None
        scaled = [None if t is None else (t if factor == 1.0 else t * factor) for t in (to_weight, to_bias)]
        to_weight = None if scaled[0] is None else scaled[0].to(weight.dtype)
        to_bias = None if scaled[1] is None else scaled[1].to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None


def _to_gradient(z: Tensor, labels: Tensor, log_probs: Tensor) -> None:
    """(n, V) logits become [y] - p in place; their (n,) log-probs are filled in."""
    step = max(1, CACHED // z.shape[1])
    for first in range(0, len(z), step):
        rows, here = z[first : first + step], labels[first : first + step, None]
        highest = rows.amax(1, keepdim=True)
        label_logit = rows.gather(1, here) - highest
        total = rows.sub_(highest).exp_().sum(1, keepdim=True)
        log_probs[first : first + step] = (label_logit - total.log())[:, 0]
        rows.div_(-total).scatter_add_(1, here, torch.ones_like(total))


def _common_factor(grad: Tensor, slopes: Tensor) -> float | None:
    """f with grad = f * slopes, None where there is no such number."""
    if not len(grad):
        return 1.0
    wide = slopes.double()
    factor = float((grad * wide).sum() / wide.square().sum().clamp(min=torch.finfo(wide.dtype).tiny))
    largest, error = float(grad.abs().max()), float((grad - factor * wide).abs().max())
    if not error <= TOLERANCE * largest:  # also where one of them is not a number
        return None
    return 1.0 if abs(factor - 1.0) <= TOLERANCE else factor


def _normalisers(tile: Tile, labels: Tensor, log_probs: Tensor) -> Tensor:
    """(N,) log-sum-exp, from the log-probs: one logit per token less."""
    z = (tile.hidden.float() * tile.weight.index_select(0, labels).to(tile.hidden.dtype).float()).sum(-1)
    z = z.to(tile.hidden.dtype).float()
    if tile.bias is not None:
        z = z + tile.bias.index_select(0, labels)
    return z * tile.shape.factor - log_probs
