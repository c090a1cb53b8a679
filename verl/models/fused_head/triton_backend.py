"""The fused LM head on CUDA: cuBLAS makes a tile of logits, one Triton kernel reads it once.

In the forward pass the kernel takes a tile into the running statistics of its tokens; in the backward pass it turns the
tile into its own gradient in place. The tile keeps the dtype of the hidden states, so that bf16 moves half the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.device import AutogradContext
from verl.models.fused_head.tiled import Shape, Statistics, Tile, backward_of, forward_of

BLOCK = 4096
WARPS = 8


@triton.jit
def _logit(raw, scale, softcap, temperature, CAPPED: tl.constexpr):
    """Logits and tanh of the capped ones (0 without) from the raw product."""
    z = raw.to(tl.float32) * scale
    t = z * 0.0
    if CAPPED:
        t = 2.0 * tl.sigmoid(2.0 * z / softcap) - 1.0
        z = t * softcap
    return z / temperature, t


@triton.jit
def _absorb(
    tile, stride, labels, running, num_tokens, width, first_word, scale, softcap, temperature,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token: its row of the tile joins its five running numbers."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(labels + row) - first_word
    highest = tl.load(running + row)
    total = tl.load(running + num_tokens + row)
    weighted = tl.load(running + 2 * num_tokens + row)
    squares = tl.load(running + 3 * num_tokens + row)
    label_logit = tl.load(running + 4 * num_tokens + row)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        raw = tl.load(tile + row * stride + column, mask=inside, other=0.0)
        z, _ = _logit(raw, scale, softcap, temperature, CAPPED)
        label_logit += tl.sum(tl.where(column == place, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        now = tl.maximum(highest, tl.max(z, 0))
        shrink = tl.exp(highest - now)
        p = tl.exp(z - now)
        if ENTROPY:
            weighted = shrink * (weighted + total * (highest - now)) + tl.sum(tl.where(inside, p * (z - now), 0.0), 0)
        if SQUARED:
            squares = squares * shrink * shrink + tl.sum(p * p, 0)
        total = total * shrink + tl.sum(p, 0)
        highest = now
    tl.store(running + row, highest)
    tl.store(running + num_tokens + row, total)
    tl.store(running + 2 * num_tokens + row, weighted)
    tl.store(running + 3 * num_tokens + row, squares)
    tl.store(running + 4 * num_tokens + row, label_logit)


@triton.jit
def _differentiate(
    tile, stride, labels, lse, entropy, squared, to_log_prob, to_entropy, to_squared, width, first_word,
    scale, softcap, temperature,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, SQUARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and block: logits become their gradient before scale and temperature, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    where = tile + row * stride + column
    z, t = _logit(tl.load(where, mask=inside, other=0.0), scale, softcap, temperature, CAPPED)
    upstream = tl.load(to_log_prob + row)
    log_p = z - tl.load(lse + row)
    p = tl.exp(log_p)
    weight = z * 0.0 + upstream
    if ENTROPY:
        weight += tl.load(to_entropy + row) * (log_p + tl.load(entropy + row))
    if SQUARED:
        weight -= 2.0 * tl.load(to_squared + row) * (p - tl.load(squared + row))
    dz = tl.where(column == tl.load(labels + row) - first_word, upstream, 0.0) - p * weight
    if CAPPED:
        dz = dz * (1.0 - t * t)
    tl.store(where, dz.to(tile.dtype.element_ty), mask=inside)


class TritonTile(Tile):
    """Tiles whose logits stay as the matrix product wrote them until a kernel reads them."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape):
        super().__init__(hidden, weight, bias, shape)
        self._product: Tensor | None = None

    def product(self, tokens: slice, words: slice) -> Tensor:
        """(n, v) in the dtype of the hidden states: h W' + b."""
        hidden, weight = self.hidden[tokens], self.weight[words].to(self.hidden.dtype)
        size = len(hidden) * len(weight)
        if self._product is None or self._product.numel() < size:
            self._product = torch.empty(size, dtype=hidden.dtype, device=hidden.device)
        out = self._product[:size].view(len(hidden), len(weight))
        torch.mm(hidden, weight.t(), out=out)
        return out if self.bias is None else out.add_(self.bias[words])

    def absorb(self, running: Tensor, tokens: slice, words: slice, labels: Tensor, extras: tuple[bool, bool]) -> None:
        z = self.product(tokens, words)
        _absorb[(len(z),)](
            z, z.stride(0), labels[tokens], running[:, tokens.start :], running.shape[1], z.shape[1], words.start,
            *self._constants(), ENTROPY=extras[0], SQUARED=extras[1], BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def gradient(
        self,
        tokens: slice,
        words: slice,
        labels: Tensor,
        statistics: Statistics,
        grads: tuple[Tensor, ...],
    ) -> Tensor:
        z = self.product(tokens, words)
        highest, log_total, entropy, squared = statistics.of(tokens)
        lse = highest + log_total
        upstream = [grad[tokens].contiguous() for grad in grads]
        _differentiate[(len(z), triton.cdiv(z.shape[1], BLOCK))](
            z, z.stride(0), labels[tokens], lse, entropy if entropy is not None else lse,
            squared if squared is not None else lse, *upstream, z.shape[1], words.start, *self._constants(),
            ENTROPY=entropy is not None, SQUARED=squared is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return z

    def _constants(self) -> tuple[float, float, float, bool]:
        shape = self.shape
        return shape.scale, shape.softcap or 1.0, shape.temperature, shape.softcap is not None


class TritonStatistics(torch.autograd.Function):
    """As `verl.models.fused_head.tiled.TokenStatistics`."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shape: Shape,
        extras: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward_of(TritonTile, ctx, hidden, weight, bias, labels, shape, extras)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return backward_of(TritonTile, ctx, *grads)
