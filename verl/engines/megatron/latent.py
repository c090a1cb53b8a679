"""Latent attention over Megatron-Core's local layers; with Transformer Engine its own are used.

The local layers as they come compute a wrong gradient under tensor parallelism: each rank's part of the heads alone
reaches the rotary part of the keys, which all heads share. Here every rank projects down to the whole latent vectors of
its part of the tokens, as with Transformer Engine, and sequence parallelism sums what the ranks find.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn
from torch.nn import functional as F

from verl.engines.megatron.packed import PackedAttention

# Megatron-Core 0.16 takes Transformer Engine for installed here also where its names are stand-ins.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


class DownProjection(nn.Module):
    """x -> x W^T with all of W on every tensor-parallel rank."""

    def __init__(self, size: int, config: Any, device: str | torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, config.hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class LatentAttention(multi_latent_attention.MLASelfAttention):  # type: ignore[misc]
    """Megatron-Core's, with down-projections that are not cut."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        device = torch.device(torch.cuda.current_device())
        both = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = DownProjection(both, config, device)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config.q_lora_rank, config, device)


class CoreAttention(PackedAttention):
    """The local one, which takes the width of values from ``kv_channels``."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any):
        super().__init__(*args, **kwargs)  # built twice: only the second call passes the widths
        assert v_channels in (0, self.hidden_size_per_attention_head), "kv_channels is the width of values"
