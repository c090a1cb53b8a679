"""The attention function that trained models use: plain causal rows, or a packed row whose segments the caller names.

It is registered with transformers, so the model code of any family works as it is, provided that it goes through
transformers' attention interface and hands its keyword
arguments on. Whether it does is tried out (`enable`), not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from verl.config.machine.config_json import STATE_LAYERS
from verl.errors import ModelError
from verl.models.attention import varlen
from verl.models.attention.flash_cpu import FlashOnCPU
from verl.models.attention.masked import AttentionVariant, Run, causal_attention, masked_attention, seeing_ahead
from verl.models.attention.mixers import give_back, take_over, token_mixers
from verl.models.attention.segments import NO_PREFIX, Segments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "verl_packed"
TAKEN_OVER = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
PROBE_LENGTHS = (7, 5, 3)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
LOW_PRECISION_TOLERANCE = 0.1
REFUSALS = (ModelError, TypeError, ValueError, RuntimeError, AttributeError, IndexError)
"""What layers raise that do not hand on what they are called with."""


class AttentionPlan(Protocol):
    """What a model is called with as ``attention_plan``: who attends to whom in its packed row."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: AttentionVariant) -> Tensor:
        """(T, H, d) queries, (T, h, d) keys, (T, h, d_v) values -> (T, H, d_v)."""
        ...


@dataclass(frozen=True, eq=False)
class PackedPlan:
    """The plan of a packed row on one device.

    Args:
        runs: (first, end) of tokens that see each other in both directions, none across the border of a segment.
    """

    segments: Segments
    runs: tuple[tuple[int, int], ...] = ()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: AttentionVariant) -> Tensor:
        query, key, value = _one_dtype(query, key, value)
        made = packed_attention(query, key, value, self.segments, how)
        return seeing_ahead(made, query, key, value, self._runs, how)

    @cached_property
    def _runs(self) -> list[Run]:
        return [(first, end, self.segments.context(first, end)) for first, end in self.runs]


def packed_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: AttentionVariant) -> Tensor:
    """Attention inside the segments of a packed row, on the fastest exact path there is for it.

    Args:
        query: (T, H, d). key: (T, h, d). value: (T, h, d_v); h divides H.

    Returns:
        (T, H, d_v).
    """
    query, key, value = _one_dtype(query, key, value)
    if how.window is not None and segments.longest_context <= how.window:
        how = AttentionVariant(how.scaling, None, how.softcap, how.dropout)
    plain = how.window is None and how.softcap is None and not how.dropout
    padded, width = _pad_values(value, query.shape[-1])
    if (
        query.is_cuda
        and varlen.package() is not None
        and varlen.takes_tensors(query, padded)
        and not segments.followers
    ):
        return varlen.package_attention(query, key, padded, segments, how)[..., :width]
    if plain and varlen.takes_tensors(query, padded):
        return _apply(varlen.FlashVarlen, query, key, padded, segments, how.scaling)[..., :width]
    if plain and query.device.type == "cpu":
        return _apply(FlashOnCPU, query, key, padded, segments, how.scaling)[..., :width]
    return masked_attention(query, key, value, segments, how)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments)


def _one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The dtype of autocast, which torch's own attention would take, or that of the values."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensors[-1].dtype
    return tuple(x.to(dtype) for x in tensors)


def _pad_values(value: Tensor, dim: int) -> tuple[Tensor, int]:
    """Values as wide as queries (some families have narrower ones, and flash kernels take equal widths)."""
    width = value.shape[-1]
    return (value if width >= dim else F.pad(value, (0, dim - width))), width


@torch.compiler.disable  # its plan holds sizes that change with every micro-batch: compiled layers end in front of it
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function in transformers' interface: (B, H, L, d) -> (B, L, H, d_v)."""
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ModelError("attention sinks and position biases are not supported by the packed attention")
    how = AttentionVariant(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, dropout)
    if attention_plan is None:
        return causal_attention(query, key, value, how, attention_mask).transpose(1, 2).contiguous(), None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # an index would copy their gradients
    return attention_plan.attend(q, k, v, how).unsqueeze(0), None


def mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """(B, 1, L, E) bool for a batch that comes with a mask; none is needed for aligned or packed rows."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **kwargs)


AttentionInterface.register(ATTENTION_NAME, attention)
AttentionMaskInterface.register(ATTENTION_NAME, mask)


def enable(model: PreTrainedModel, device: torch.device | str) -> bool:
    """Give a model this attention, if a packed row then gives what its sequences give one by one.

    It does what those of `TAKEN_OVER` do, with FlashAttention's own package where that is installed. Another one that
    somebody chose stays, and so does that of a model that fails. Collective on a sharded model.
    """
    text = model.config.get_text_config()
    before = getattr(text, "_attn_implementation", None)
    if before == ATTENTION_NAME:
        return True
    kinds = getattr(text, "layer_types", None) or ()
    sideways = any(word in kind for kind in kinds for word in STATE_LAYERS)
    if getattr(text, "sliding_window", None) is not None and not getattr(model, "_supports_flash_attn", False):
        return False  # only families that serve flash kernels are sure to name their window to the attention
    mixers = token_mixers(model)
    hands_on = mixers or (getattr(model, "_supports_attention_backend", False) and not sideways)
    if before not in TAKEN_OVER or not hands_on:
        return False
    _set_attention(model, ATTENTION_NAME)
    hooks = take_over(model, mixers)
    trains = model.training
    model.eval()
    try:
        if _packs(model, device):
            return True
    except REFUSALS as error:  # the family needs something of its layers that these do not have
        if not (mixers or isinstance(error, ModelError)):
            raise
    finally:
        model.train(trains)
    give_back(mixers, hooks)
    _set_attention(model, before)
    return False


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Of the language model alone: a vision encoder attends in both directions."""
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is model.config.get_text_config()]
    model.set_attn_implementation(dict.fromkeys(parts, name) if parts else name)


@torch.no_grad()
def _packs(model: PreTrainedModel, device: torch.device | str) -> bool:
    """Whether a packed row gives what its sequences give one by one, tried out on a few tokens.

    Everything that looks sideways outside attention (convolutions, recurrent states) shows here.
    """
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, vocabulary, (1, n), generator=generator).to(device) for n in PROBE_LENGTHS]
    rows[1][0, 0] = rows[2][0, 0] = rows[0][0, 0]  # the second and third share the prefix of one token with the first
    row_logits = [model(input_ids=row, attention_mask=None, use_cache=False).logits[0] for row in rows]
    segments = Segments((1, *(n - 1 for n in PROBE_LENGTHS)), (NO_PREFIX, 0, 0, 0), device)
    packed = model(
        input_ids=torch.cat([rows[0][:, :1], *(row[:, 1:] for row in rows)], 1),
        attention_mask=None,
        position_ids=segments.position_ids,
        use_cache=False,
        attention_plan=PackedPlan(segments),
    ).logits[0]
    expected = torch.cat([row_logits[0][:1], *(logits[1:] for logits in row_logits)])
    scale = expected.abs().max().clamp(min=1e-3)
    tolerance = TOLERANCE.get(packed.dtype, LOW_PRECISION_TOLERANCE)
    return bool(((packed - expected).abs().max() / scale).float() <= tolerance)
