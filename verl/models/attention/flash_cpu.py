"""Exact attention of a packed row with torch's flash kernel for CPUs, forward and backward.

Every segment attends to itself in one call and to its prefix in another; the two are merged through their log-sum-exp
(Dao 2023, arXiv 2307.08691, section 3). The kernel's backward pass needs of a call only the probabilities, which are
exp(score - log-sum-exp), so that with the merged output and log-sum-exp each call gives its share of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.device import AutogradContext
from verl.models.attention.segments import Grid, Segments

LANES = 16
"""Numbers of float32 that the kernel's forward pass takes at a time; what is left of a row it takes one by one."""
HIDDEN = 1e30
"""Log-sum-exp of a padding cell: every probability of its row is then 0."""


class FlashOnCPU(torch.autograd.Function):
    """(T, H, d) queries, (T, h, d) keys and values -> (T, H, d); h divides H."""

    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=_accumulator(query, segments), device=query.device)
        lse = torch.empty(query.shape[:2], dtype=_at_least_float32(query), device=query.device)
        for grid in segments.grids:
            part, part_lse = _forward(grid, grid, query, key, value, True, scale)
            grid.put(out, part)
            grid.put(lse, part_lse)
        for queries, keys in segments.to_prefix:
            part, part_lse = _forward(queries, keys, query, key, value, False, scale)
            merged, own_lse = queries.take(out), queries.take(lse)
            share = torch.sigmoid(part_lse - own_lse)  # of the prefix in the probabilities
            queries.put(out, merged.lerp_(part.to(merged.dtype), share[..., None].to(merged.dtype)))
            queries.put(lse, torch.logaddexp(own_lse, part_lse))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Below float32 the kernel's backward pass takes several times as long as in float32.
        query, key, value, out, lse, grad = (x.to(_at_least_float32(x)) for x in (*ctx.saved_tensors, grads[0]))
        segments: Segments = ctx.segments
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        for grid in segments.grids:
            parts = _backward(grid, grid, grad, query, key, value, out, lse, True, ctx.scale)
            for target, part in zip(gradients, parts):
                grid.put(target, part)
        for queries, keys in segments.to_prefix:
            parts = _backward(queries, keys, grad, query, key, value, out, lse, False, ctx.scale)
            for target, grid, part in zip(gradients, (queries, keys, keys), parts):
                grid.add(target, part)
        return *(x.to(grads[0].dtype) for x in gradients), None, None


def _accumulator(query: Tensor, segments: Segments) -> torch.dtype:
    """What is summed over two calls is summed in float32 at least."""
    return _at_least_float32(query) if segments.followers else query.dtype


def _at_least_float32(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _forward(
    queries: Grid, keys: Grid, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(B, L, H, d) and its log-sum-exp (B, L, H)."""
    fill = _fill(keys.columns) if causal else 0  # behind the last query: no query attends to it
    arguments = (_cells(grid, x, fill) for grid, x in ((queries, query), (keys, key), (keys, value)))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments, 0.0, causal, scale=scale)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return out[:, : queries.columns], lse[:, : queries.columns]


def _fill(columns: int) -> int:
    """Cells up to the next multiple of the kernel's lanes, where they cost less than a remainder without lanes."""
    missing = -columns % LANES
    return missing if missing < LANES // 2 else 0


def _cells(grid: Grid, values: Tensor, fill: int) -> Tensor:
    """(T, heads, d) -> (B, heads, L + fill, d)."""
    cells = grid.take(values)
    return (F.pad(cells, (0, 0, 0, 0, 0, fill)) if fill else cells).transpose(1, 2)


def _backward(
    queries: Grid,
    keys: Grid,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients (B, L, heads, d) of one call's queries, keys and values."""
    grad, grad_lse = queries.take(grad), queries.take(lse)
    if queries.padding is not None:
        grad = grad.masked_fill(queries.padding[..., None, None], 0.0)
        grad_lse = grad_lse.masked_fill(queries.padding[..., None], HIDDEN)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    parts = kernel(
        *(
            x.transpose(1, 2)
            for x in (grad, queries.take(query), keys.take(key), keys.take(value), queries.take(out), grad_lse)
        ),
        0.0,
        causal,
        scale=scale,
    )
    return tuple(x.transpose(1, 2) for x in parts)
