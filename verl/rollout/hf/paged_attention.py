"""Attention of one new token per row over pages, and the small operations around it.

Two implementations of one interface: plain torch operations, which run anywhere and define what is right, and Triton
kernels (`kernels`) that read only the pages a row has.

Shapes: R rows, H query heads, h key/value heads, d head dimension, N pages, P tokens per page, E pages per table row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from verl.rollout.hf.native import NativeLayer, NativeModel, rotate
from verl.rollout.hf.paged_cache import PAGE, PagedCache


@dataclass(frozen=True)
class StepBuffers:
    """What a decoding step reads, at addresses that never change.

    Args:
        ids, positions: (R,) int64, the token to put in and its position.
        tables: (R, E) int32 page numbers.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor

    def first(self, rows: int) -> StepBuffers:
        return StepBuffers(self.ids[:rows], self.positions[:rows], self.tables[:rows])


class PagedAttention(Protocol):
    """Made for one step; called once per layer, like `Attend`."""

    def __init__(self, native: NativeModel, cache: PagedCache, step: StepBuffers): ...

    def __call__(self, layer: NativeLayer, x: torch.Tensor) -> torch.Tensor: ...


class TorchPagedAttention:
    """Plain operations: gathers every page of the tables, so its cost follows the longest row."""

    def __init__(self, native: NativeModel, cache: PagedCache, step: StepBuffers):
        self.cache, self.step = cache, step
        self.cos, self.sin = native.rotation(step.positions)
        slot = step.positions % PAGE
        page = step.tables.gather(1, (step.positions // PAGE)[:, None])[:, 0].long()
        self._cell = (page, slot)
        self._keys = torch.arange(step.tables.shape[1] * PAGE, device=slot.device)

    def __call__(self, layer: NativeLayer, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in layer.projections.qkv(x))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        keys, values = self.cache.keys[layer.number], self.cache.values[layer.number]
        page, slot = self._cell
        keys[page, :, slot], values[page, :, slot] = k, v
        # (R, E, h, P, d) -> (R, h, E * P, d)
        seen_keys, seen_values = (pool[self.step.tables].transpose(1, 2).flatten(2, 3) for pool in (keys, values))
        grouped = q.unflatten(1, (k.shape[1], -1)) * layer.flavour.scaling
        scores = (grouped @ seen_keys.transpose(2, 3)).float()
        positions = self.step.positions[:, None]
        hidden = self._keys > positions
        if layer.flavour.window is not None:
            hidden |= self._keys <= positions - layer.flavour.window
        probs = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1).to(q.dtype)
        return (probs @ seen_values).flatten(1)
