"""Exact attention of a packed row with variable-length flash kernels on CUDA.

Without shared prompts and where a FlashAttention package is installed, its kernel does it (version 3 before 2). Else
the kernel inside torch: one call for all segments, one more for all that follow a prefix, merged like on the CPU
(`flash_cpu`). Half precision only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from verl.device import AutogradContext
from verl.models.attention.masked import AttentionVariant
from verl.models.attention.segments import Segments

PACKAGES = {3: "flash_attn_interface", 2: "flash_attn"}
MAX_HEAD_DIM = 256


@functools.cache
def package() -> tuple[int, Callable[..., Any]] | None:
    """The newest installed FlashAttention: its version and its variable-length function."""
    for version, module in PACKAGES.items():
        if importlib.util.find_spec(module) is not None:
            return version, importlib.import_module(module).flash_attn_varlen_func
    return None


def package_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: AttentionVariant) -> Tensor:
    """Segments without prefixes through the installed package; shapes as in `masked_attention`."""
    installed = package()
    assert installed is not None and not segments.followers
    version, function = installed
    ends, longest = cumulative(segments.lengths, segments.device), max(segments.lengths)
    options: dict[str, Any] = {"causal": True, "softmax_scale": how.scaling}
    if how.window is not None:
        options["window_size"] = (how.window - 1, 0)
    if how.softcap is not None:
        options["softcap"] = how.softcap
    if version == 2:
        options["dropout_p"] = how.dropout
    out = function(
        query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, **options
    )
    return out[0] if isinstance(out, tuple) else out


def cumulative(lengths: tuple[int, ...] | list[int], device: str | torch.device) -> Tensor:
    """(n + 1,) int32: 0 and where each range ends."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device, non_blocking=True)


class VarlenCall:
    """Ranges of queries and of keys, as the kernel wants them; the k-th query range sees the k-th key range."""

    def __init__(
        self, queries: list[tuple[int, int]], keys: list[tuple[int, int]], causal: bool, device: str | torch.device
    ):
        self.q, self.k = _hull(queries), _hull(keys)
        self.q_ends = cumulative([length for _, length in queries], device)
        self.k_ends = cumulative([length for _, length in keys], device)
        self.longest = max(length for _, length in queries), max(length for _, length in keys)
        self.causal = causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple]:
        """Output (t, H, d), log-sum-exp (t, H) float32, and the kernel's random state."""
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            query[self.q], key[self.k], value[self.k], self.q_ends, self.k_ends, *self.longest, 0.0, self.causal, False,
            scale=scale,
        )  # fmt: skip
        return out, lse.transpose(0, 1), (rng, unused)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        rng: tuple,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.q, self.k
        return torch.ops.aten._flash_attention_backward(
            grad[q].contiguous(), query[q], key[k], value[k], out[q], lse[q].transpose(0, 1).contiguous(),
            self.q_ends, self.k_ends, *self.longest, 0.0, self.causal, *rng, scale=scale,
        )  # fmt: skip


def calls(segments: Segments) -> tuple[VarlenCall, VarlenCall | None]:
    """All segments on themselves; all followers on their prefixes, which must lie in front of every follower."""
    spans = list(zip(segments.starts, segments.lengths))
    prefixes = list(segments.followers)
    if not prefixes:
        return VarlenCall(spans, spans, True, segments.device), None
    queries, keys = list(segments.followers.values()), [spans[p] for p in prefixes]
    return VarlenCall(spans, spans, True, segments.device), VarlenCall(queries, keys, False, segments.device)


class FlashVarlen(torch.autograd.Function):
    """(T, H, d) queries, (T, h, d) keys and values in half precision -> (T, H, d)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        causal, to_prefix = calls(segments)
        out, lse, rng = causal.forward(query, key, value, scale)
        rngs = [rng]
        if to_prefix is not None:
            prefix, prefix_lse, rng = to_prefix.forward(query, key, value, scale)
            rngs.append(rng)
            own_lse, own_out = lse[to_prefix.q], out[to_prefix.q]
            both = torch.logaddexp(own_lse, prefix_lse)
            merged = own_out * torch.exp(own_lse - both)[..., None] + prefix * torch.exp(prefix_lse - both)[..., None]
            out, lse = out.clone(), lse.clone()
            out[to_prefix.q], lse[to_prefix.q] = merged.to(out.dtype), both
        ctx.save_for_backward(query, key, value, out, lse, *(state for pair in rngs for state in pair))
        ctx.calls, ctx.scale = (causal, to_prefix), scale
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *states = ctx.saved_tensors
        causal, to_prefix = ctx.calls
        dq, dk, dv = causal.backward(grads[0], query, key, value, out, lse, tuple(states[:2]), ctx.scale)
        if to_prefix is not None:
            pq, pk, pv = to_prefix.backward(grads[0], query, key, value, out, lse, tuple(states[2:]), ctx.scale)
            for target, where, part in ((dq, to_prefix.q, pq), (dk, to_prefix.k, pk), (dv, to_prefix.k, pv)):
                target[where] += part
        return dq, dk, dv, None, None


def takes_tensors(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel inside torch takes these tensors."""
    dim = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and is_half and value.shape[-1] == dim and dim % 8 == 0 and dim <= MAX_HEAD_DIM


def _hull(ranges: list[tuple[int, int]]) -> slice:
    """The slice that the ranges fill without a gap."""
    first = ranges[0][0]
    if any(a + n != b for (a, n), (b, _) in pairwise(ranges)):
        raise ValueError("the ranges of a variable-length call must lie side by side")
    return slice(first, ranges[-1][0] + ranges[-1][1])
