"""Parts of TorchTitan's models that are this library's own: rotary embedding and attention of packed rows.

Both follow transformers, so that a weight lies in memory as it lies in the files, and rows may be packed as everywhere
else. They are made per device because TorchTitan's classes exist only once it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from verl.engines.torchtitan.package import import_torchtitan
from verl.models.attention import AttentionPlan
from verl.models.attention.interface import attention


class Parts(NamedTuple):
    """The classes of `parts`."""

    rope: Any
    attention: Any


@cache
def parts(device: str) -> Parts:
    """Rotary embedding and inner attention as TorchTitan's models take them."""
    module: Any = import_torchtitan("protocols.module", device).Module
    base: Any = import_torchtitan("models.common.rope", device).CosSinRoPE

    class GivenRoPE(base):
        """Rotates by frequencies that transformers computed, at any position: nothing bounds the length of a row."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            frequencies: tuple[float, ...] = ()
            attention_scaling: float = 1.0

        def _precompute_cache(self) -> Tensor:
            return torch.tensor(self.config.frequencies, dtype=torch.float32)

        def _reshape_cache(self, query: Tensor, positions: Tensor | None = None) -> Tensor:
            assert positions is not None, "a pass always gives positions"
            frequencies = self.cache.to_local() if isinstance(self.cache, DTensor) else self.cache
            half = positions.float()[:, :, None, None] * frequencies
            angles = torch.cat([half, half], dim=-1)
            turned = torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.attention_scaling
            if not isinstance(query, DTensor):
                return turned
            mesh = query.device_mesh
            return DTensor.from_local(turned, mesh, [Replicate()] * mesh.ndim, run_check=False)

    class PlannedAttention(module):
        """Attention inside the segments of a packed row, or causal attention of padded rows."""

        @dataclass(kw_only=True, slots=True)
        class Config(module.Config):
            pass

        def __init__(self, config: Any):
            super().__init__()

        def forward(
            self,
            q_BLNH: Tensor,
            k_BLNH: Tensor,
            v_BLNH: Tensor,
            *,
            attention_masks: AttentionPlan | None = None,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
            return attention(self, q, k, v, None, scaling=scale, attention_plan=attention_masks)[0]

    return Parts(GivenRoPE, PlannedAttention)
