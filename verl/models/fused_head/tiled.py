"""Log-probabilities and entropies straight from hidden states, one tile of logits at a time.

The (tokens x vocabulary) logits of a batch are the largest tensor of training by far, and a loss needs only a few
numbers per token. Tiles over the vocabulary with a running log-sum-exp need memory for one tile; the backward pass
computes each tile again (Wijmans et al. 2024, arXiv 2411.09009; Hsu et al. 2024, arXiv 2410.10989). Tiles cut the
vocabulary and not the tokens, so that every row of the weight and of its gradient is read and written once.

Shapes: N tokens, H hidden, V vocabulary. z = softcap(scale * (h W' + b)) / temperature are the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl.device import AutogradContext

CPU_TILE = 1 << 21
GPU_TILE = 1 << 26
"""Numbers of one tile: it should stay in the cache of a CPU, and fill a GPU."""
MAX_TOKENS = 4096
LOWEST = -1e30
"""Stands for -inf as the first maximum, so that nothing becomes NaN."""


@dataclass(frozen=True)
class Shape:
    """What happens to the product of hidden states and weight before the softmax, and the size of a tile.

    Args:
        temperature: logits are divided by it, last.
        scale: the family's own factor.
        softcap: the family's bound on logits, softcap * tanh(logit / softcap); None none.
        tile: numbers per tile; None chooses by device. The result depends on it by rounding alone.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    tile: int | None = None

    @property
    def factor(self) -> float:
        """Without soft-capping scale and temperature are one factor."""
        return self.scale if self.softcap is not None else self.scale / self.temperature

    def tiles(self, num_tokens: int, vocabulary: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """(tokens, vocabulary) of every tile."""
        size = self.tile or (CPU_TILE if device.type == "cpu" else GPU_TILE)
        block = max(1, min(num_tokens, MAX_TOKENS, size))
        width = max(1, min(vocabulary, size // block))
        for first in range(0, num_tokens, block):
            for start in range(0, vocabulary, width):
                yield slice(first, min(first + block, num_tokens)), slice(start, min(start + width, vocabulary))


class Statistics(NamedTuple):
    """What the gradient of a tile needs of all tiles, (N,) float32 each.

    The log-sum-exp is kept as two numbers: rounded as one of the logits' size, it would leave probabilities near 1
    with a hundred times the error that their distance from 1 can bear.
    """

    highest: Tensor
    log_total: Tensor
    """Of the sum of exp(z - highest)."""
    entropy: Tensor | None = None
    squared: Tensor | None = None

    def of(self, tokens: slice) -> Statistics:
        """Those of some tokens."""
        entropy, squared = (None if x is None else x[tokens] for x in (self.entropy, self.squared))
        return Statistics(self.highest[tokens], self.log_total[tokens], entropy, squared)


class Tile:
    """One tile of logits, computed into memory that all tiles share."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape):
        self.hidden, self.weight, self.bias, self.shape = hidden, weight, bias, shape
        self._memory: list[Tensor] = []

    def scratch(self, number: int, rows: int, columns: int) -> Tensor:
        """(rows, columns) float32 of the ``number``-th buffer."""
        while len(self._memory) <= number:
            self._memory.append(torch.empty(0, dtype=torch.float32, device=self.hidden.device))
        if self._memory[number].numel() < rows * columns:
            self._memory[number] = torch.empty(rows * columns, dtype=torch.float32, device=self.hidden.device)
        return self._memory[number][: rows * columns].view(rows, columns)

    def logits(self, tokens: slice, words: slice) -> tuple[Tensor, Tensor | None]:
        """z (n, v) float32 in buffer 0; with soft-capping also tanh in buffer 2."""
        hidden, weight = self.hidden[tokens], self.weight[words].to(self.hidden.dtype)
        z = self.scratch(0, len(hidden), len(weight))
        if hidden.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=z)
        else:
            z.copy_(hidden @ weight.t())  # rounded as the head itself would round
        if self.bias is not None:
            z += self.bias[words]
        shape = self.shape
        if shape.softcap is None:
            return z.mul_(shape.factor) if shape.factor != 1.0 else z, None
        capped = torch.tanh(z.mul_(shape.scale / shape.softcap), out=self.scratch(2, *z.shape))
        return torch.mul(capped, shape.softcap / shape.temperature, out=z), capped

    def absorb(self, running: Tensor, tokens: slice, words: slice, labels: Tensor, extras: tuple[bool, bool]) -> None:
        """Take one tile into the running statistics, (5, N) float32: highest, total, weighted, squares, label_logit."""
        z, _ = self.logits(tokens, words)
        highest, total, weighted, squares, label_logit = running[:, tokens]
        place = labels[tokens] - words.start
        inside = (place >= 0) & (place < z.shape[1])
        here = z.gather(1, place.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        label_logit.copy_(torch.where(inside, here, label_logit))
        now = torch.maximum(highest, z.amax(1))
        step = highest - now
        shrink = torch.exp(step)
        z.sub_(now[:, None])
        p = torch.exp(z, out=self.scratch(1, *z.shape))
        if extras[0]:  # sum of p * (z - highest), moved to the new highest
            weighted.add_(total * step).mul_(shrink)
        total.mul_(shrink).add_(p.sum(1))
        if extras[1]:
            squares.mul_(shrink.square()).add_(torch.linalg.vector_norm(p, dim=1).square())
        if extras[0]:
            weighted.add_(p.mul_(z).sum(1))
        highest.copy_(now)

    def gradient(
        self,
        tokens: slice,
        words: slice,
        labels: Tensor,
        statistics: Statistics,
        grads: tuple[Tensor, ...],
    ) -> Tensor:
        """(n, v): the gradient of one tile of logits before scale and temperature.

        d log p_y = 1_y - p; d entropy = -p (log p + entropy); d sum p^2 = 2 p (p - sum p^2).
        """
        highest, log_total, entropy, squared = statistics.of(tokens)
        z, capped = self.logits(tokens, words)
        to_log_prob = grads[0][tokens][:, None]
        p = torch.exp(z.sub_(highest[:, None]), out=self.scratch(1, *z.shape))
        share = torch.exp(-log_total)[:, None]  # p * share are the probabilities
        if entropy is None and squared is None:
            dz = p.mul_(-to_log_prob * share)
        else:
            if entropy is None:
                weight = z.copy_(to_log_prob.expand_as(z))
            else:
                weight = z.add_((entropy - log_total)[:, None]).mul_(grads[1][tokens][:, None]).add_(to_log_prob)
            if squared is not None:
                twice = 2.0 * grads[2][tokens][:, None]
                weight.addcmul_(p, twice * share, value=-1.0).add_(twice * squared[:, None])
            dz = p.mul_(weight).mul_(-share)
        place = labels[tokens] - words.start
        rows = ((place >= 0) & (place < dz.shape[1])).nonzero()[:, 0]
        dz.index_put_((rows, place[rows]), to_log_prob[rows, 0], accumulate=True)
        return dz if capped is None else dz.mul_(capped.square_().neg_().add_(1.0))


class TokenStatistics(torch.autograd.Function):
    """hidden (N, H), weight (V, H), bias (V,) or None, labels (N,) -> log_probs, entropy, sum_pi_squared, each (N,).

    float32 whatever the inputs are. ``extras`` says which of the last two are computed; the others are zeros.
    """

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
        return forward_of(Tile, ctx, hidden, weight, bias, labels, shape, extras)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return backward_of(Tile, ctx, *grads)


def forward_of(
    kind: type[Tile],
    ctx: AutogradContext,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shape: Shape,
    extras: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward pass of `TokenStatistics` with the tiles of one backend."""
    tile = kind(hidden, weight, bias, shape)
    running = torch.zeros(5, len(labels), device=hidden.device)
    running[0] = LOWEST
    for tokens, words in shape.tiles(len(labels), len(weight), hidden.device):
        tile.absorb(running, tokens, words, labels, extras)
    highest, total, weighted, squares, label_logit = running
    log_total = total.log()
    entropy = log_total - weighted / total if extras[0] else torch.zeros_like(total)
    squared = squares / total.square() if extras[1] else torch.zeros_like(total)
    ctx.save_for_backward(hidden, weight, bias, labels, highest, log_total, entropy, squared)
    ctx.shape, ctx.extras = shape, extras
    return label_logit - highest - log_total, entropy, squared


def backward_of(kind: type[Tile], ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """The backward pass of `TokenStatistics` with the tiles of one backend."""
    hidden, weight, bias, labels, highest, log_total, entropy, squared = ctx.saved_tensors
    statistics = Statistics(highest, log_total, entropy if ctx.extras[0] else None, squared if ctx.extras[1] else None)
    grads_of_inputs = gradients(
        kind(hidden, weight, bias, ctx.shape), labels, statistics, grads, ctx.needs_input_grad[:3]
    )
    return *grads_of_inputs, None, None, None


class GradientSums:
    """Gradients of hidden states, weight and bias, as far as they are needed, summed over tiles in float32.

    Args:
        blocks: how many parts of the tokens add to the gradient of a row of the weight.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...], blocks: int):
        self._hidden, self._weight, self._bias, device = hidden, weight, bias, hidden.device
        dtype = weight.dtype if blocks == 1 else torch.float32
        self._to_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=device) if needs[0] else None
        self._to_weight = torch.zeros(weight.shape, dtype=dtype, device=device) if needs[1] else None
        self._to_bias = torch.zeros(len(weight), dtype=torch.float32, device=device) if needs[2] else None

    def add(self, dz: Tensor, tokens: slice, words: slice, factor: float) -> None:
        """Take the gradient (n, v) of a tile, which is ``factor`` times that of its product before the bias."""
        hidden = self._hidden[tokens]
        narrow = dz.to(hidden.dtype)
        if self._to_hidden is not None:
            add_product(self._to_hidden[tokens], narrow, self._weight[words].to(hidden.dtype), factor)
        if self._to_weight is not None:
            add_product(self._to_weight[words], narrow.t(), hidden, factor)
        if self._to_bias is not None:
            self._to_bias[words] += dz.sum(0, dtype=torch.float32) * factor

    def of_inputs(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the dtypes of hidden states, weight and bias."""
        return (
            None if self._to_hidden is None else self._to_hidden.to(self._hidden.dtype),
            None if self._to_weight is None else self._to_weight.to(self._weight.dtype),
            None if self._to_bias is None or self._bias is None else self._to_bias.to(self._bias.dtype),
        )


def gradients(
    tile: Tile,
    labels: Tensor,
    statistics: Statistics,
    grads: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias, as far as they are needed."""
    hidden, weight, factor = tile.hidden, tile.weight, tile.shape.factor
    if tile.shape.softcap is not None:
        factor = tile.shape.scale / tile.shape.temperature
    sums = GradientSums(hidden, weight, tile.bias, needs, -(-len(hidden) // MAX_TOKENS))
    for tokens, words in tile.shape.tiles(len(hidden), len(weight), hidden.device):
        sums.add(tile.gradient(tokens, words, labels, statistics, grads), tokens, words, factor)
    return sums.of_inputs()


def add_product(target: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """target += factor * left @ right."""
    if target.dtype == left.dtype:
        target.addmm_(left, right, alpha=factor)
    elif left.is_cuda and torch.version.hip is None:
        # A product rounded to bf16 in each tile would add up over the vocabulary to three times the error.
        target.add_(torch.mm(left, right, out_dtype=torch.float32), alpha=factor)
    else:
        target.add_(left @ right, alpha=factor)
