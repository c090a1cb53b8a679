"""Parts of TorchTitan's models that are this library's own: rotary embedding, attention of packed rows, experts.

They follow transformers: weights have the same layout in memory, and rows may be packed as everywhere else.
They are made per device because TorchTitan's classes exist only once it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from verl.engines.torchtitan.package import import_torchtitan
from verl.models.attention import AttentionPlan
from verl.models.attention.interface import attention


class Parts(NamedTuple):
    """The classes of `parts`."""

    rope: Any
    attention: Any
    experts: Any


@cache
def parts(device: str) -> Parts:
    """Rotary embedding, inner attention and experts as TorchTitan's models take them."""
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
            angles_of_half = positions.float()[:, :, None, None] * frequencies
            angles = torch.cat([angles_of_half, angles_of_half], dim=-1)
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

    class StackedExperts(module):
        """The experts of a layer, (E, 2F, D) and (E, D, F) as transformers stacks them, in the dtype of their input.

        TorchTitan's own compute in bfloat16, whatever the weights are.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(module.Config):
            dim: int
            hidden_dim: int
            num_experts: int

        def __init__(self, config: Any):
            super().__init__()
            self.num_experts = config.num_experts
            self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.hidden_dim, config.dim))
            self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))

        def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
            gate_up, down = (
                weight.to_local() if isinstance(weight, DTensor) else weight
                for weight in (self.gate_up_proj, self.down_proj)
            )
            return experts_of_rows(x_RD, num_tokens_per_expert_E, gate_up, down)

    return Parts(GivenRoPE, PlannedAttention, StackedExperts)


def experts_of_rows(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Each row through its expert: down(silu(gate(x)) * up(x)).

    Args:
        rows: (R, D), those of the first expert first; rows behind those that ``counts`` counts give zero.
        counts: (e,) rows per expert.
        gate_up: (e, 2F, D). down: (e, D, F).
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:  # the only dtype of the grouped kernel
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    sizes = counts.tolist()
    *parts, rest = rows.split([*sizes, len(rows) - sum(sizes)])
    # An expert without rows computes, too: its weights need a gradient of zeros for FSDP2's reduce-scatter.
    done = []
    for number, part in enumerate(parts):
        gate, up = F.linear(part, gate_up[number]).chunk(2, dim=-1)
        done.append(F.linear(F.silu(gate) * up, down[number]))
    return torch.cat([*done, torch.zeros_like(rest)])
