"""Whether ranks that hold the same part of a tensor hold the same bits.

A processor or memory that fails changes numbers without an error, and training continues with them. Ranks that hold
copies (data-parallel replicas, norms under tensor parallelism) compute the same from the same, so one that differs from
the others shows the damage.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl.distributed.boxes import Shards, ShardTable
from verl.distributed.ranks import Ranks
from verl.errors import EngineError
from verl.json_text import Json
from verl.protocol.sharding import ShardSpec

PIECE = 1 << 20
"""Elements that are hashed at once: each takes 16 bytes meanwhile."""
NAMED = 3
"""Tensors that an error names."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CopiesDifferError(EngineError):
    """Ranks that hold the same part of a tensor hold different bits."""


def tensor_digest(tensor: Tensor) -> int:
    """A number of 64 bits of what a tensor of any shape and dtype holds, computed where it is.

    The sum of (2 i + 1) x_i modulo 2^64, where x_i are the bits of element i as an integer. An odd factor has an
    inverse modulo 2^64, so a change of one element always changes the sum. Integers add up to the same in any order.
    """
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.int8)
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), PIECE):
        piece = bits[begin : begin + PIECE]
        odd = torch.arange(2 * begin + 1, 2 * (begin + piece.numel()), 2, dtype=torch.int64, device=bits.device)
        total += (odd * piece).sum()  # overflow wraps around, as a checksum needs
    return int(total)


def compare_copies(shards: Shards, ranks: Ranks) -> int:
    """Compare bit by bit what several ranks hold alike; only numbers of 64 bits travel. Collective.

    Args:
        shards: what this rank holds.

    Returns:
        How many boxes several ranks hold; the same on each rank.

    Raises:
        CopiesDifferError: on all ranks alike; it names tensors, ranks and their nodes.
    """
    if ranks.size == 1:
        return 0
    table = ShardTable.of(shards, ranks)
    shared = {
        (name, box): holders
        for name, boxes in table.holders.items()
        for box, holders in boxes.items()
        if len(holders) > 1
    }
    mine: Json = [[name, tensor_digest(tensor)] for name, (box, tensor) in shards.items() if (name, box) in shared]
    answers = ranks.exchange([socket.gethostname(), mine])
    nodes, digests = [answer[0] for answer in answers], [dict(answer[1]) for answer in answers]
    differing = [
        _described(name, box, holders, digests, nodes)
        for (name, box), holders in shared.items()
        if len({digests[rank][name] for rank in holders}) > 1
    ]
    if differing:
        rest = f"; and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
        raise CopiesDifferError(
            f"{len(differing)} of {len(shared)} copies differ: {'; '.join(differing[:NAMED])}{rest}",
            fix="A processor or memory is damaged, or something changes the weights of one rank alone. Resume on other "
            "hardware from the last checkpoint (trainer.resume_mode=auto): its copies were equal when it was written.",
        )
    return len(shared)


def _described(
    name: str, box: ShardSpec, holders: Sequence[int], digests: Sequence[Mapping[str, int]], nodes: Sequence[str]
) -> str:
    """Which ranks differ from most of the others; of two halves nobody can say which is right."""
    votes = Counter(digests[rank][name] for rank in holders)
    usual, count = votes.most_common(1)[0]
    part = "" if box.lengths == box.shape else f" [{', '.join(f'{low}:{high}' for low, high in box.bounds)}]"
    if 2 * count <= len(holders):
        groups = [[rank for rank in holders if digests[rank][name] == value] for value in votes]
        return f"{name}{part} on " + " differs from that on ".join(_places(group, nodes) for group in groups)
    odd = [rank for rank in holders if digests[rank][name] != usual]
    return f"{name}{part} on {_places(odd, nodes)} differs from that on {count} other ranks"


def _places(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    shown = [f"rank {rank} ({nodes[rank]})" for rank in ranks[:NAMED]]
    return " and ".join([*shown, f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else shown)
