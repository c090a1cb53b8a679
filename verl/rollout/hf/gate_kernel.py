"""The gate of the MLP as one Triton kernel. Only imported where Triton is installed.

Shapes: R rows, I width of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATE_BLOCK = 1024


@triton.jit
def _gate(x, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    gate = tl.load(x + row * 2 * size + offs, mask=mask, other=0.0)
    up = tl.load(x + row * 2 * size + size + offs, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * size + offs, (wide * tl.sigmoid(wide)).to(gate.dtype) * up, mask=mask)


def silu_gate(x: torch.Tensor) -> torch.Tensor:
    """(R, 2 * I), gate before up, contiguous -> ``silu(gate) * up`` (R, I)."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _gate[(rows, triton.cdiv(size, GATE_BLOCK))](x, out, size, BLOCK=GATE_BLOCK)
    return out
