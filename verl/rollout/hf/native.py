"""A decoder's forward pass written out, for the families that are all the same: norm, attention, norm, gated MLP.

The modules of transformers spend a third of a decoding step on small operations around the matrix products. Here the
same mathematics takes fewer and larger ones. The modules keep their weights; which family qualifies is a table, and the
result is compared with the modules' own before it is trusted (`probe`).

Shapes: T packed tokens, H query heads, h KV heads, d head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from verl.models.attention import AttentionVariant
from verl.rollout.hf.attention import StepPlan, UnsupportedModelError
from verl.rollout.hf.projections import (
    GRID,
    CopiedLinear,
    FusedProjections,
    LayerModules,
    PackedProjections,
    PlainLinear,
    Projections,
    can_pack,
    laid_out,
)
from verl.rollout.hf.quantized import QuantizedLinear, quantized_layers

FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position alone, so that a table can hold them."""
MAX_TABLE = 1 << 20


class Attend(Protocol):
    """From normed inputs (T, hidden) of a layer to its attention's result (T, H * d)."""

    def __call__(self, layer: NativeLayer, x: torch.Tensor) -> torch.Tensor: ...


class Norm:
    """Root-mean-square norm over the last dimension, in float32 inside; the weight stays the module's."""

    def __init__(self, module: Any):
        self.weight: torch.Tensor = module.weight
        self.eps = float(module.variance_epsilon)
        self._eps = torch.tensor(self.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        # torch's own is made of more operations here, and takes up to twice as long.
        wide = x if x.dtype == torch.float32 else x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        scaled = wide * scale if wide is x else wide.mul_(scale)
        return scaled.mul_(self.weight).to(x.dtype)


class NativeLayer:
    """One decoder layer.

    Args:
        module: the layer of transformers.
        variant: of its attention.
        projections: how its matrix products are computed.
    """

    def __init__(self, number: int, module: Any, variant: AttentionVariant, projections: Projections):
        self.number, self.variant, self.projections = number, variant, projections
        attention = module.self_attn
        self.head_dim = int(attention.head_dim)
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self._first_norm, self._second_norm = Norm(module.input_layernorm), Norm(module.post_attention_layernorm)
        parts = dict(attention.named_children())
        self.q_norm, self.k_norm = (Norm(parts[name]) if name in parts else None for name in ("q_norm", "k_norm"))

    def __call__(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.projections.out(attend(self, self._first_norm(x)), x)
        normed = self._second_norm(x)
        return self.projections.mlp(normed, x)


@dataclass(frozen=True)
class PlannedAttention:
    """Attention by a step plan.

    Args:
        cos, sin: see `NativeModel.rotation`.
    """

    plan: StepPlan
    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, layer: NativeLayer, x: torch.Tensor) -> torch.Tensor:
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in layer.projections.qkv(x))
            q, k = layer.q_norm(q), layer.k_norm(k)
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        else:
            heads = layer.projections.joint_qkv(x).unflatten(-1, (-1, layer.head_dim))
            num_rotated, num_queries = heads.shape[1] - layer.num_kv_heads, heads.shape[1] - 2 * layer.num_kv_heads
            rotated = rotate(heads[:, :num_rotated], self.cos, self.sin)
            q, k, v = rotated[:, :num_queries], rotated[:, num_queries:], heads[:, num_rotated:]
        return self.plan.attend(layer.number, q, k, v, layer.variant).flatten(1)


class NativeModel:
    """Logits of packed tokens, by a step plan for the attention.

    Args:
        model: a causal language model of one of `FAMILIES`, whose weights only the sampler changes: they are packed
            or fused. Call `refresh` when new ones have arrived; what takes long of it waits for the next pass.
        variants: per layer, as the family's own modules call attention.
        max_positions: length of the rotary table.

    Attributes:
        packs: products read copies of the weights.
        before_copies, after_copies: called before the copies are made and, where ``packs``, after it.

    Raises:
        UnsupportedModelError: not such a model.
    """

    def __init__(self, model: PreTrainedModel, variants: Sequence[AttentionVariant], max_positions: int):
        _check(model, max_positions)
        inner: Any = model.model
        self.model, self.max_positions = model, max_positions
        self.packs = model.device.type == "cpu" and can_pack(model.dtype, sum(p.nbytes for p in model.parameters()))
        make: Callable[[LayerModules], Projections] = PackedProjections if self.packs else FusedProjections
        if not self.packs and any(quantized_layers(model)):
            make = partial(PackedProjections, lay_out=PlainLinear)
        self.layers = [
            NativeLayer(number, module, variants[number], make(_modules(module)))
            for number, module in enumerate(inner.layers)
        ]
        self._norm, self._embedding = Norm(inner.norm), inner.embed_tokens
        self._head: Any = model.get_output_embeddings()
        self._packed_head: CopiedLinear | None = None
        self._fewest_rows = 1
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_stale = True
        self.before_copies: Callable[[], None] = _nothing
        self.after_copies: Callable[[], None] = _nothing

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """(T,) token ids and positions -> logits (T or len(logit_rows), V)."""
        return self.forward(ids, PlannedAttention(plan, *self.rotation(positions)), logit_rows)

    def forward(self, ids: torch.Tensor, attend: Attend, logit_rows: torch.Tensor | None = None) -> torch.Tensor:
        """As above, with any attention."""
        self._lay_out()
        x = self._embedding.weight[ids]
        for layer in self.layers:
            x = layer(x, attend)
        return self.logits(x if logit_rows is None else x[logit_rows])

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, 1, d) cosines, and sines with the sign that `rotate` needs."""
        cos, sin = self.table
        return cos[positions], sin[positions]

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of all positions, (max_positions, 1, d) each."""
        if self._table is None:
            self._table = self._make_table()
        return self._table

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        x = self._norm(x)
        if self._packed_head is not None:
            return self._packed_head(x)
        return F.linear(x, self._head.weight, self._head.bias)

    def rows_for(self, tokens: int) -> int:
        """The number of tokens to compute for these: padded to a multiple of `GRID` where that is faster."""
        self._lay_out()
        if not self.packs or (tokens <= GRID and self._fewest_rows == 1):
            return tokens
        return -(-tokens // GRID) * GRID

    def refresh(self) -> None:
        """The parameters hold new values."""
        self._is_stale = True

    def _lay_out(self) -> None:
        """Copy new values into the form that products read.

        It takes longer than the transfer of the weights. The trainer must not wait for it, so the next pass does it.
        """
        if not self._is_stale:
            return
        self._is_stale = False
        self.before_copies()
        for layer in self.layers:
            layer.projections.refresh()
        if self.packs:
            self._packed_head = laid_out(self._head.weight, self._head.bias)
            in_layers = (layer.projections.fewest_rows for layer in self.layers)
            self._fewest_rows = max(self._packed_head.fewest_rows, *in_layers)
            self.after_copies()

    def release(self) -> None:
        """Free the copies of the weights, until the next pass."""
        self._is_stale = True
        for layer in self.layers:
            layer.projections.release()
        self._packed_head = None

    @property
    def num_copied_bytes(self) -> int:
        """Memory of the copies of the weights."""
        head = 0 if self._packed_head is None else self._packed_head.num_bytes
        return head + sum(layer.projections.num_bytes for layer in self.layers)

    def _make_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        inner: Any = self.model.model
        positions = torch.arange(self.max_positions, device=self.model.device)[None]
        with torch.no_grad():
            cos, sin = inner.rotary_emb(self._embedding.weight[:1], positions)
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return cos[0][:, None].contiguous(), signed[0][:, None].contiguous()


def _nothing() -> None: ...


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (T, heads, d): halves swap places; ``sin`` carries the minus of the first half."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _modules(layer: Any) -> LayerModules:
    a, m = layer.self_attn, layer.mlp
    modules = LayerModules(a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)
    for module in vars(modules).values():
        if type(module) not in (nn.Linear, QuantizedLinear):
            raise UnsupportedModelError(f"one of its layers is a {type(module).__name__}, not a plain linear layer")
    return modules


def _check(model: PreTrainedModel, max_positions: int) -> None:
    config = vars(model.config)
    rope = dict(config.get("rope_parameters") or {})
    reasons = {
        "its family is not one of " + ", ".join(sorted(FAMILIES)): type(model).__name__ in FAMILIES,
        "its activation is not silu": config.get("hidden_act") == "silu",
        "its rotary embedding is not a function of the position": rope.get("rope_type", "default") in FIXED_ROTATIONS,
        "it rotates a part of each head only": rope.get("partial_rotary_factor", 1.0) == 1.0,
        "its context has no limit": max_positions <= MAX_TABLE,
        "its head is not a plain linear layer": type(model.get_output_embeddings()) is nn.Linear,
    }
    for reason, holds in reasons.items():
        if not holds:
            raise UnsupportedModelError(reason)
