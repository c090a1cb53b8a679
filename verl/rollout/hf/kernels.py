"""Triton kernels of a decoding step: rotate and store, attention over pages.

Each replaces a handful of launches by one, and the attention reads exactly the pages that a row has, whatever the
longest row of the batch is. A row's keys are cut over several programs where there are fewer rows than processors
(split keys: Dao et al., "Flash-Decoding", 2023), and a second kernel joins the parts by their log-sum-exp.

Only imported where Triton is installed. `TRITON_INTERPRET=1` runs them on CPU, which is how they were first tested.

Shapes: R rows, H query heads, h key/value heads, G = H / h, d head dimension, P tokens per page, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.rollout.hf.native import NativeLayer, NativeModel
from verl.rollout.hf.paged_attention import StepBuffers
from verl.rollout.hf.paged_cache import PAGE, PagedCache

MIN_GROUP = 16
"""Rows of the smallest matrix product that the tensor cores take."""
MAX_SPLITS = 32
PROGRAMS_WANTED = 512
"""Programs that keep a large GPU's memory busy."""


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, q_weight, k_weight, positions, tables, q_out, keys, values, eps, table_stride,
    H: tl.constexpr, h: tl.constexpr, D: tl.constexpr, P: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    offs = tl.arange(0, D)
    partner = (offs + D // 2) % D
    source = qkv + (row * (H + 2 * h) + head) * D
    position = tl.load(positions + row)
    x = tl.load(source + offs)
    if head < H + h:
        other = tl.load(source + partner)
        kind = x.dtype
        if NORMS:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
            if head < H:
                weight = q_weight
            else:
                weight = k_weight
            x = (wide * scale * tl.load(weight + offs).to(tl.float32)).to(kind)
            other = (other.to(tl.float32) * scale * tl.load(weight + partner).to(tl.float32)).to(kind)
        c = tl.load(cos + position * D + offs).to(tl.float32)
        s = tl.load(sin + position * D + offs).to(tl.float32)
        x = (x.to(tl.float32) * c + other.to(tl.float32) * s).to(kind)
    if head < H:
        tl.store(q_out + (row * H + head) * D + offs, x)
    else:
        page = tl.load(tables + row * table_stride + position // P).to(tl.int64)
        cell = ((page * h + (head - H) % h) * P + position % P) * D + offs
        if head < H + h:
            tl.store(keys + cell, x)
        else:
            tl.store(values + cell, x)


@triton.jit
def _attend(
    q, keys, values, tables, positions, out, partial, lse, scale, window, table_stride,
    H: tl.constexpr, h: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    first_page = first // P
    last_page = (length + P - 1) // P
    share = (last_page - first_page + S - 1) // S
    start = first_page + split * share
    stop = tl.minimum(start + share, last_page)
    offs_g, offs_d, offs_p = tl.arange(0, GROUP), tl.arange(0, D), tl.arange(0, P)
    heads = head * G + offs_g
    wanted = (offs_g < G)[:, None]
    query = tl.load(q + (row * H + heads)[:, None] * D + offs_d[None, :], mask=wanted, other=0.0)
    largest = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP], dtype=tl.float32)
    found = tl.zeros([GROUP, D], dtype=tl.float32)
    for number in range(start, stop):
        page = tl.load(tables + row * table_stride + number).to(tl.int64)
        cells = (page * h + head) * P * D + offs_p[:, None] * D + offs_d[None, :]
        key = tl.load(keys + cells)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        position = number * P + offs_p
        scores = tl.where(((position < length) & (position >= first))[None, :], scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new)
        weights = tl.exp(scores - new[:, None])
        value = tl.load(values + cells)
        total = total * shrink + tl.sum(weights, axis=1)
        found = found * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = new
    if S == 1:
        target = out + (row * H + heads)[:, None] * D + offs_d[None, :]
        tl.store(target, (found / total[:, None]).to(out.dtype.element_ty), mask=wanted)
    else:
        # A split without pages has a sum of 0: its weight in the joint softmax is exp(-inf).
        safe = tl.where(total > 0, total, 1.0)
        part = (row * H + heads) * S + split
        tl.store(partial + part[:, None] * D + offs_d[None, :], found / safe[:, None], mask=wanted)
        level = tl.where(total > 0, largest + tl.log(safe), float("-inf"))
        tl.store(lse + part, level, mask=offs_g < G)


@triton.jit
def _join(partial, lse, out, D: tl.constexpr, S: tl.constexpr):
    cell = tl.program_id(0)
    offs_s, offs_d = tl.arange(0, S), tl.arange(0, D)
    level = tl.load(lse + cell * S + offs_s)
    weight = tl.exp(level - tl.max(level, axis=0))
    parts = tl.load(partial + (cell * S + offs_s)[:, None] * D + offs_d[None, :])
    found = tl.sum(parts * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + cell * D + offs_d, found.to(out.dtype.element_ty))


class TritonPagedAttention:
    """See `PagedAttention`; needs a head dimension that is a power of two."""

    def __init__(self, native: NativeModel, cache: PagedCache, step: StepBuffers):
        self.cache, self.step = cache, step
        self.cos, self.sin = native.table

    def __call__(self, layer: NativeLayer, x: torch.Tensor) -> torch.Tensor:
        step, cache = self.step, self.cache
        qkv = layer.projections.joint_qkv(x)
        rows, per_key, dim = qkv.shape[0], cache.shape.num_heads, layer.head_dim
        heads = qkv.shape[1] // dim - 2 * per_key
        q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
        keys, values = cache.keys[layer.number], cache.values[layer.number]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        _rotate_and_store[(rows, heads + 2 * per_key)](
            qkv, self.cos, self.sin,
            *((q, q) if norms is None else (norm.weight for norm in norms)),
            step.positions, step.tables, q, keys, values,
            0.0 if norms is None else norms[0].eps, step.tables.stride(0),
            H=heads, h=per_key, D=dim, P=PAGE, NORMS=norms is not None, num_warps=1,
        )  # fmt: skip
        return self._attend(layer, q, keys, values)

    def _attend(self, layer: NativeLayer, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        step, per_key = self.step, self.cache.shape.num_heads
        rows, heads, dim = q.shape
        splits = splits_for(rows * per_key)
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
        partial = torch.empty((rows, heads, splits, dim) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, splits) if splits > 1 else (1,), dtype=torch.float32, device=q.device)
        group = heads // per_key
        _attend[(rows, per_key, splits)](
            q, keys, values, step.tables, step.positions, out, partial, lse,
            layer.flavour.scaling, layer.flavour.window or 0, step.tables.stride(0),
            H=heads, h=per_key, G=group, GROUP=max(MIN_GROUP, triton.next_power_of_2(group)), D=dim, P=PAGE, S=splits,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _join[(rows * heads,)](partial, lse, out, D=dim, S=splits, num_warps=1)
        return out


def splits_for(programs: int) -> int:
    """Into how many parts each row's keys are cut: a power of two."""
    splits = 1
    while splits < MAX_SPLITS and programs * splits < PROGRAMS_WANTED:
        splits *= 2
    return splits
