"""Packed rows on Megatron-Core's layers, and which part of their tokens a context-parallel rank has.

The local layers have an attention of ours, which knows the sequences of a row; ranks that share a row exchange heads
for tokens around it (`verl.distributed.ulysses`), so that each computes as much of it as the others. Transformer
Engine has its own attention for both; it wants two pieces of every sequence per rank, one from the front and one from
the back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor, nn

from verl.distributed import Ranks
from verl.engines.rows import MicroBatch
from verl.engines.sequence_parallel import local_tokens
from verl.models.attention import AttentionPlan, AttentionVariant, PackedPlan, Segments
from verl.models.attention.varlen import cumulative


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """A packed row as Megatron-Core's local layers receive it.

    Megatron-Core takes this rank's tokens for one sequence, whose rotary positions `RowPositions` chooses.

    Args:
        plan: who attends to whom.
        position_ids: (tokens of this rank,) in their sequences.
    """

    plan: AttentionPlan | None = None
    position_ids: Tensor | None = None


class PackedAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron-Core's local attention, and for packed rows that of `verl.models.attention`.

    Attributes:
        softcap: bounds the scores of packed rows.
    """

    softcap: float | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Tensor:
        """(T, H, d) queries, (T, h, d) keys, (T, h, d_v) values of a packed row -> (T, H * d_v)."""
        if packed_seq_params is None:
            return super().forward(query, key, value, *args, **options)  # type: ignore[no-any-return]
        softmax = self.scale_mask_softmax
        how = AttentionVariant(
            scaling=self.softmax_scale * (softmax.scale or 1.0),
            window=None if softmax.window_size is None else softmax.window_size[0] + 1,
            softcap=self.softcap,
            dropout=self.attention_dropout.p if self.training else 0.0,
        )
        return packed_seq_params.plan.attend(query, key, value, how).flatten(1)  # type: ignore[no-any-return]


class RowPositions(nn.Module):
    """Rotary positions of the tokens of a packed row, from those of one sequence.

    The row travels as the length that Megatron-Core asks for and hands on, so that layers which are computed again
    see their own row's positions whatever has run since.

    Args:
        rotary: Megatron-Core's, of (length, 1, 1, d) angles.
    """

    def __init__(self, rotary: Any):
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, *args: Any, **options: Any) -> Any:
        row = next((x for x in (*args, *options.values()) if isinstance(x, PackedRow)), None)
        return self.rotary.get_rotary_seq_len(*args, **options) if row is None else row

    def forward(self, length: object, **options: Any) -> Any:
        if not isinstance(length, PackedRow):
            return self.rotary(length, **options)
        angles = self.rotary(length.max_seqlen_q, packed_seq=True)
        if isinstance(angles, tuple):  # with a factor of the attention
            return angles[0][length.position_ids], *angles[1:]
        return angles[length.position_ids]


def local_part(micro: MicroBatch, context: Ranks) -> tuple[MicroBatch, PackedRow]:
    """This rank's tokens of a packed micro-batch for the local layers; equally many for each rank of ``context``."""
    plan = micro.attention
    assert isinstance(plan, PackedPlan), "only packed rows are shared"
    longest = max(plan.segments.lengths)
    mine = local_tokens(micro, context) if context.size > 1 else micro
    tokens = mine.input_ids.shape[1]
    row = PackedRow(
        **_thd(cumulative([tokens], mine.input_ids.device), longest),
        plan=mine.attention,
        position_ids=mine.position_ids[0],
    )
    return mine, row


def fast_part(micro: MicroBatch, context: Ranks, tensor: int) -> tuple[MicroBatch, PackedSeqParams, Tensor]:
    """This rank's tokens as Transformer Engine wants them, and (tokens,) which of the micro-batch they are, or -1.

    Args:
        tensor: ranks that share these tokens again.
    """
    plan = micro.attention
    assert isinstance(plan, PackedPlan), "only packed rows are shared"
    lengths, source = two_pieces(plan.segments, context.rank, context.size, tensor)
    source = source.to(micro.input_ids.device)
    real = source >= 0
    place = torch.full((plan.segments.num_tokens,), -1, device=source.device)
    place[source[real]] = torch.arange(len(source), device=source.device)[real]
    here = (place[micro.positions] >= 0).nonzero().flatten()
    mine = replace(
        micro,
        input_ids=torch.where(real, micro.input_ids[0, source], 0)[None],
        position_ids=torch.where(real, micro.position_ids[0, source], 0)[None],
        positions=place[micro.positions[here]],
        labels=micro.labels[here],
        places=micro.places[here],
        candidates=None if micro.candidates is None else micro.candidates[here],
        token_of=None if micro.token_of is None else places_here(micro.token_of, place),
    )
    ends = cumulative(lengths, source.device)
    row = PackedSeqParams(**_thd(ends, max(lengths)), cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends)
    return mine, row, source


def places_here(token_of: Tensor, place: Tensor) -> Tensor:
    """The index of each token of the rows among this rank's, -1 where it is another rank's or no token.

    Args:
        token_of: (b, l) as in `MicroBatch`.
        place: (tokens of the packed row,) the same of the row's tokens.
    """
    return torch.where(token_of < 0, -1, place.cpu()[token_of.clamp(min=0)])


def _thd(ends: Tensor, longest: int) -> dict[str, Any]:
    """Fields of a row in which queries and keys are the same sequences.

    Args:
        ends: (sequences + 1,) int32, where they begin and end.
    """
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def two_pieces(segments: Segments, rank: int, size: int, tensor: int) -> tuple[list[int], Tensor]:
    """Lengths of the padded sequences, and the tokens of the row that a context-parallel rank has, -1 for padding.

    Every sequence is cut into 2 ``size`` pieces, and rank r has piece r from the front and piece r from the back: under
    a causal mask all ranks then compute as much.
    """
    if size == 1:
        return list(segments.lengths), torch.arange(segments.num_tokens)
    multiple, lengths, parts = 2 * size * tensor, [], []
    for start, length in zip(segments.starts, segments.lengths):
        lengths.append(-(-length // multiple) * multiple)
        pieces = torch.arange(lengths[-1]).view(2 * size, -1)
        tokens = torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))
        parts.append(torch.where(tokens < length, start + tokens, -1))
    return lengths, torch.cat(parts)
