"""Who sends which piece of a weight to whom, for all weights that are divided in the same way at once.

Both layouts divide a weight into pieces along one axis each. What a rank needs is cut into the parts that lie in one
piece of the trainer; it keeps the part that it holds, and receives each other part once, from a rank of its replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl.weight_sync.resharding.layout import Indices

Span = tuple[int, int]


@dataclass(frozen=True)
class Division:
    """How a weight is divided over ranks.

    Args:
        axis: the axis that is cut.
        bounds: ``pieces + 1`` borders on it, not decreasing, from 0 to its length.
        index: (world,) the piece of each rank; -1: it holds none.
        replica: (world,) the replica to which a rank belongs; each that holds anything holds every piece.
    """

    axis: int
    bounds: tuple[int, ...]
    index: Indices
    replica: Indices

    @property
    def pieces(self) -> int:
        """Into how many pieces."""
        return len(self.bounds) - 1

    @property
    def length(self) -> int:
        """Of the axis."""
        return self.bounds[-1]

    def span(self, piece: int) -> Span:
        """The part of the axis that a piece covers."""
        return self.bounds[piece], self.bounds[piece + 1]


@dataclass(frozen=True)
class Routes:
    """Parts on their way; part ``i`` is the common part of the sender's and the receiver's piece.

    Attributes:
        sender, receiver, source, target: (parts,) ranks, and the numbers of their pieces.
        kept: (world,) share of the weight that a rank needs and holds.
        needed, owned: (world,) shares that it needs, and that it holds for training.
        share: (parts,) of the weight.
    """

    sender: Indices
    receiver: Indices
    source: Indices
    target: Indices
    share: np.ndarray
    kept: np.ndarray
    needed: np.ndarray
    owned: np.ndarray


def overlaps(ours: Division, theirs: Division) -> np.ndarray:
    """(pieces of ours, pieces of theirs) share of the weight that two pieces have in common."""
    a, b = np.asarray(ours.bounds, dtype=np.int64), np.asarray(theirs.bounds, dtype=np.int64)
    if ours.axis == theirs.axis:
        low = np.maximum(a[:-1, None], b[None, :-1])
        high = np.minimum(a[1:, None], b[None, 1:])
        return np.maximum(high - low, 0) / max(ours.length, 1)
    return np.diff(a)[:, None] / max(ours.length, 1) * (np.diff(b)[None, :] / max(theirs.length, 1))


def routes_between(source: Division, target: Division) -> Routes:
    """The parts that must travel so that every rank gets its target piece."""
    common = overlaps(source, target)
    needs = np.flatnonzero(target.index >= 0)
    transfers = common[:, target.index[needs]].T > 0  # (receivers, source pieces)
    transfers[np.arange(len(needs)), source.index[needs]] &= source.index[needs] < 0
    place, piece = np.nonzero(transfers)
    receiver = needs[place]
    sender = _senders(source, receiver, piece)
    part = target.index[receiver]
    world = len(source.index)
    local_share = np.zeros(world)
    both = np.flatnonzero((target.index >= 0) & (source.index >= 0))
    local_share[both] = common[source.index[both], target.index[both]]
    needed, owned = _held(target, common.sum(0), world), _held(source, common.sum(1), world)
    return Routes(sender, receiver, piece, part, common[piece, part], local_share, needed, owned)


def common_unit(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """The largest number that divides all borders: weights whose borders agree in this unit share their routes."""
    return math.gcd(*source, *target) or 1


def _held(division: Division, share: np.ndarray, world: int) -> np.ndarray:
    held = np.zeros(world)
    holds = division.index >= 0
    held[holds] = share[division.index[holds]]
    return held


def _senders(source: Division, receiver: Indices, piece: Indices) -> Indices:
    """For each missing piece a holder in the receiver's replica; several holders take turns, so that all send alike."""
    if not len(receiver):
        return receiver
    replicas = int(source.replica.max()) + 1
    holders = np.flatnonzero(source.index >= 0)
    group = source.index[holders] * replicas + source.replica[holders]
    order = np.argsort(group, kind="stable")
    holders, group = holders[order], group[order]
    requests = piece * replicas + source.replica[receiver]
    first, last = np.searchsorted(group, requests, "left"), np.searchsorted(group, requests, "right")
    assert (last > first).all(), "a replica lacks a piece"
    turn = np.empty(len(requests), dtype=np.int64)
    by_group = np.argsort(requests, kind="stable")
    starts = np.searchsorted(requests[by_group], requests[by_group], "left")
    turn[by_group] = np.arange(len(requests)) - starts
    return holders[first + turn % (last - first)]
