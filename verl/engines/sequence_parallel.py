"""Ulysses in an engine: some peer ranks hold the same rows, each a part of their tokens.

An engine is handed rows per rank, with or without it; here peers pool theirs, run them together and take their own
results back. So callers of an engine see no difference. Only attention and the end of a pass see other ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed import Ranks
from verl.distributed.ulysses import UlyssesPlan, summed
from verl.engines.forward import TokenForward
from verl.engines.packing import padded
from verl.engines.rows import MicroBatch
from verl.engines.seen_rows import COLUMN as PICTURES
from verl.engines.seen_rows import entry_tensors
from verl.errors import ConfigError, NotBuiltError
from verl.models.attention import PackedPlan
from verl.models.attention.mixers import mixes_by_sequence
from verl.models.router_replay import COLUMN
from verl.protocol import SHARED_ROWS, DataProto
from verl.protocol.codec import tensor_bytes, tensor_from_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEY = "ulysses_sequence_parallel_size"


def sequence_peers(ranks: Ranks, size: int) -> Ranks:
    """The ``size`` peers that share their rows with this rank, itself included.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """
    if size <= 1:
        return Ranks()
    if ranks.size % size:
        raise ConfigError(
            f"{ranks.size} processes do not divide into groups that share a sequence",
            key=KEY,
            got=size,
            allowed=[d for d in range(1, ranks.size + 1) if ranks.size % d == 0],
        )
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks.size, size)]
    return Ranks(ranks.rank % size, size, groups[ranks.rank // size])


def check_heads(config: PretrainedConfig, size: int, key: str = KEY) -> None:
    """Raise `ConfigError` where the query heads of a model cannot be split evenly over ``size`` ranks."""
    heads = config.get_text_config().num_attention_heads
    if heads % size:
        raise ConfigError(
            f"the model's {heads} attention heads cannot be shared evenly by {size} processes",
            key=key,
            got=size,
            allowed=[d for d in range(1, heads + 1) if heads % d == 0],
        )


class SequenceForward(TokenForward):
    """A forward pass of which this rank computes its part of the tokens; its results are those of all tokens."""

    key: ClassVar[str] = KEY
    """The setting behind it, for messages."""

    def __init__(self, peers: Ranks, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.peers = peers
        if peers.size > 1 and not self.passes.packed:
            raise ConfigError(
                "sequence parallelism needs packed rows, which are off or which this model does not allow",
                key=self.key,
                got=peers.size,
                fix="Set use_remove_padding=true in the model's section, or the size to 1.",
            )
        if mixes_by_sequence(self.model):
            raise NotBuiltError(
                f"{type(self.model).__name__} has layers that carry a state from token to token, "
                "which processes cannot share yet",
                key=KEY,
                got=peers.size,
                fix="Leave it out: every process then computes rows of its own.",
            )

    def __call__(self, micro: MicroBatch, outputs: Sequence[str], temperature: float = 1.0) -> dict[str, Tensor]:
        if self.peers.size == 1:
            return super().__call__(micro, outputs, temperature)
        parts = super().__call__(local_tokens(micro, self.peers), outputs, temperature)
        experts = parts.pop(COLUMN, None)
        # Every position is on one rank, and 0 on the others.
        ids = {name: self.peers.max(parts.pop(name)) for name in list(parts) if not parts[name].is_floating_point()}
        full = {**ids, **{name: summed(values, self.peers) for name, values in parts.items()}}
        if experts is not None:  # every token is on one rank, and NO_RECORD on the others
            full[COLUMN] = self.peers.max(experts.int()).to(experts.dtype) if experts.numel() else experts
        return full


def local_tokens(micro: MicroBatch, peers: Ranks) -> MicroBatch:
    """This rank's tokens of a packed micro-batch; padding at its end, a segment of its own, makes all parts equal."""
    if micro.attention is None:
        return micro  # the filler of ranks without rows: a token without attention to it
    micro = padded(micro, peers.size)
    plan = micro.attention
    assert isinstance(plan, PackedPlan), "sequence parallelism cuts packed rows"
    length = plan.segments.num_tokens // peers.size
    first = peers.rank * length
    token_of = None
    if micro.token_of is not None:
        is_here = (micro.token_of >= first) & (micro.token_of < first + length)
        token_of = torch.where(is_here, micro.token_of - first, -1)
    here = ((micro.positions >= first) & (micro.positions < first + length)).nonzero().flatten()
    return replace(
        micro,
        input_ids=micro.input_ids[:, first : first + length],
        position_ids=micro.position_ids[..., first : first + length],
        positions=micro.positions[here] - first,
        labels=micro.labels[here],
        places=micro.places[here],
        slopes=None if micro.slopes is None else micro.slopes[here],
        candidates=None if micro.candidates is None else micro.candidates[here],
        attention=UlyssesPlan(plan, peers),
        token_of=token_of,
        vision=None if micro.vision is None else micro.vision.part(first, length),
    )


def rows_of_peers(batch: DataProto, peers: Ranks) -> tuple[DataProto, slice]:
    """The rows that this rank and its peers compute together, and which of them are its own.

    They are handed to all of them alike where the caller knows who computes together (`SHARED_ROWS`); else each has
    rows of its own.
    """
    if peers.size == 1 or batch.meta_info.get(SHARED_ROWS):
        return batch, slice(None)
    return pooled(batch, peers)


def pooled(batch: DataProto, peers: Ranks) -> tuple[DataProto, slice]:
    """The rows of all peers, and which of them are this rank's.

    Tensors travel as bytes, those of images included; of other columns only ``uid`` is read behind this point.
    """
    columns: Any = batch.tensors
    (pictures, shown), _ = peers.together(lambda: (_distinct_pictures(batch), None))  # an error is one on all ranks
    parts = [{str(name): tensor for name, tensor in columns.items()}, *pictures]
    tensors = [{name: tensor.cpu().contiguous() for name, tensor in part.items()} for part in parts]
    forms = [[[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in p.items()] for p in tensors]
    raw = [tensor_bytes(tensor) for part in tensors for tensor in part.values()]
    data = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *raw]))
    column = batch.non_tensor_batch.get("uid")
    uids = None if column is None else [str(uid) for uid in column]
    facts = peers.exchange([forms, uids, shown, len(data)])
    padded = torch.zeros(max(fact[-1] for fact in facts), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = [_unpacked(fact, raw) for fact, raw in zip(facts, peers.gather(padded))]
    before = sum(len(part) for part in rows[: peers.rank])
    all_rows = DataProto.concat(rows)
    all_rows.meta_info = dict(batch.meta_info)
    return all_rows, slice(before, before + len(batch))


def _distinct_pictures(batch: DataProto) -> tuple[list[dict[str, Tensor]], list[int] | None]:
    """What the processor made of images, once for all rows that share it, and which of them each row has.

    None where the batch has no such column.
    """
    column = batch.non_tensor_batch.get(PICTURES)
    if column is None:
        return [], None
    distinct = {id(inputs): inputs for inputs in column}
    number = {key: at for at, key in enumerate(distinct)}
    return [entry_tensors(inputs) for inputs in distinct.values()], [number[id(inputs)] for inputs in column]


def _unpacked(fact: Any, raw: Tensor) -> DataProto:
    forms, uids, shown, _ = fact
    at, data, parts = 0, raw.numpy(), list[dict[str, Tensor]]()
    for part in forms:
        parts.append({})
        for name, dtype, shape in part:
            kind = getattr(torch, dtype)
            size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            parts[-1][name] = tensor_from_bytes(data[at : at + size].copy(), kind, shape)
            at += size
    columns: dict[str, Any] = {} if uids is None else {"uid": uids}
    if shown is not None:
        columns[PICTURES] = [parts[1 + number] for number in shown]
    return DataProto.from_dict(tensors=parts[0], non_tensors=columns)
