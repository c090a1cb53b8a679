"""Carry out a plan: batch by batch, each part from its holder to the rank that lacks it.

A batch is a part of one layer, or a few layers that fill half a bucket together, so a rank holds at most one layer of
sampling weights besides its own, plus the parts that are copied to another layout on their way (those cut along another
axis than the first). A message costs as much as a hundred kilobytes, so the small parts that one rank has for another
one in a batch travel as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import EngineError
from verl.weight_sync.resharding.plan import Entry, Plan
from verl.weight_sync.resharding.routes import Division

BUCKET_BYTES = 256 << 20
SMALL = 256 << 10
"""Parts of at most that many bytes travel together."""
ALIGNMENT = 64
Cut = tuple[slice, ...]
_Parts = dict[tuple[int, torch.dtype], list[Tensor]]


@dataclass(frozen=True)
class Batch:
    """Weights that travel together: (name, entry) in one order on all ranks; ``number`` is the same on all."""

    number: int
    weights: list[tuple[str, Entry]]


@dataclass
class _Job:
    """What one rank does for every weight of an entry."""

    needs: bool
    sends: list[tuple[int, Cut]]  # receiver, slice of this rank's training shard
    receives: list[tuple[int, Cut]]  # sender, slice of this rank's sampling shard
    keeps: tuple[Cut, Cut] | None  # slices of the training and of the sampling shard
    shape: tuple[int, ...]  # of the sampling shard


class Resharder:
    """One rank's part in a plan.

    Args:
        rank: this process's, which is its number in the plan.
        dtype: of all shards on both sides, but those of ``dtypes``.
        dtypes: name of a weight's template -> its own.
        device: where the sampling shards are made.
        bucket_bytes: most bytes that a rank receives in one batch (one weight at least).

    Attributes:
        sent_bytes: put on the wire by this rank so far.
        peak_bytes: the most that was held besides the training shards at any time.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        dtype: torch.dtype,
        dtypes: Mapping[str, torch.dtype] | None = None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.plan, self.rank = plan, rank
        self.dtype, self.device, self.bucket_bytes = dtype, torch.device(device), bucket_bytes
        self.dtypes = dict(dtypes or {})
        self.sent_bytes = self.peak_bytes = self._held = 0
        self._jobs: dict[int, _Job] = {}
        self._known_sizes: dict[int, np.ndarray] = {}
        self._batches: list[Batch] | None = None
        self._staging = torch.empty(0, dtype=torch.uint8, device=self.device)

    def batches(self) -> Iterator[Batch]:
        """The same batches on every rank; a new one starts where the bucket is full.

        Weights of several layers travel together only while they, and their staging copies, take half a
        bucket each: then they need no more room than a layer and a bucket.
        """
        weights: list[tuple[str, Entry]] = []
        full, number, last = np.zeros(3), 0, -1
        for layer, name, entry in self.plan.expanded():
            size = self._sizes(entry)
            shared_room = np.inf if layer == last >= 0 else self.bucket_bytes / 2
            if weights and (full + size > (self.bucket_bytes, self.bucket_bytes / 2, shared_room)).any():
                yield Batch(number, weights)
                weights, full, number = [], np.zeros(3), number + 1
            weights.append((name, entry))
            full, last = full + size, layer
        if weights:
            yield Batch(number, weights)

    def run(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Exchange everything; all ranks of the plan iterate at once.

        Args:
            read: this rank's training shard of a weight; called only for weights of which it holds a piece. It may not
                change until the next batch begins.

        Yields:
            name and sampling shard of every weight that this rank needs. A shard that it holds already is given as it
            is, without a copy.

        Raises:
            EngineError: a shard that has another shape than the plan says.
        """
        if self._batches is None:
            self._batches = list(self.batches())
        try:
            for batch in self._batches:
                self._held = 0
                yield from self._exchange(batch, read)
        finally:
            self._staging = self._staging[:0].clone()

    def _exchange(self, batch: Batch, read: Callable[[str], Tensor]) -> list[tuple[str, Tensor]]:
        leaving: _Parts = defaultdict(list)
        arriving: _Parts = defaultdict(list)
        exchanged: list[tuple[str, Tensor]] = []
        for name, entry in batch.weights:
            job = self._job(entry)
            shard = self._shard(read, name, entry)
            for receiver, cut in job.sends:
                assert shard is not None
                leaving[receiver, shard.dtype].append(shard[cut])
            if not job.needs:
                continue
            if job.keeps and not job.receives:
                assert shard is not None
                exchanged.append((name, shard[job.keeps[0]]))
                continue
            target = self._counted(torch.empty(job.shape, dtype=self._dtype(entry), device=self.device))
            for sender, cut in job.receives:
                arriving[sender, target.dtype].append(target[cut])
            if job.keeps and shard is not None:
                target[job.keeps[1]].copy_(shard[job.keeps[0]])
            exchanged.append((name, target))
        self._travel(leaving, arriving)
        return exchanged

    def _travel(self, leaving: _Parts, arriving: _Parts) -> None:
        """Send and receive the parts of a batch; both sides list what goes from one to the other in one order."""
        coming = [(peer, message) for (peer, _), places in arriving.items() for message in _messages(places)]
        going = [
            (peer, message)
            for (peer, _), parts in sorted(leaving.items(), key=self._turn)
            for message in _messages(parts)
        ]
        rooms = self._rooms([message for _, message in (*coming, *going)])
        # Receiving comes first, so that no sender waits for a receive buffer.
        taken = [(dist.irecv, peer, room) for (peer, _), room in zip(coming, rooms)]
        sent = [(dist.isend, peer, room) for (peer, _), room in zip(going, rooms[len(coming) :])]
        for (_, message), (_, _, room) in zip(going, sent):
            self.sent_bytes += room.nbytes
            for part, place in _places(message, room):
                place.copy_(part)
        operations = [dist.P2POp(run, room, peer) for run, peer, room in (*taken, *sent)]
        # Every rank of the plan, one batch of weights after the other; a rank that no part goes to or from sits out.
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        for (_, message), room in zip(coming, rooms):
            for place, arrived in _places(message, room):
                place.copy_(arrived)

    def _turn(self, leaving: tuple[tuple[int, torch.dtype], list[Tensor]]) -> int:
        """Each rank begins with the next rank, or all would send to rank 0 at once, then to rank 1."""
        return (leaving[0][0] - self.rank) % self.plan.sampling.world

    def _rooms(self, messages: list[list[Tensor]]) -> list[Tensor]:
        """The contiguous memory of each message: its only part as it is, or a staging buffer that all batches share."""
        sizes = [0 if _in_one_piece(message) else sum(part.nbytes for part in message) for message in messages]
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if sum(sizes) > self._staging.numel():
            self._staging = self._staging[:0].clone()  # frees the old one first
            self._staging = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self.peak_bytes = max(self.peak_bytes, self._held + self._staging.numel())
        rooms = []
        for message, memory in zip(messages, self._staging[: sum(sizes)].split(sizes)):
            size = sum(part.nbytes for part in message)
            rooms.append(memory[:size].view(message[0].dtype) if len(memory) else message[0])
        return rooms

    def _shard(self, read: Callable[[str], Tensor], name: str, entry: Entry) -> Tensor | None:
        piece = int(entry.source.index[self.rank])
        if piece < 0:
            return None
        shard = read(name)
        shape = _piece_shape(entry, entry.source, piece)
        if tuple(shard.shape) != shape or shard.dtype != self._dtype(entry):
            raise EngineError(
                "the training shard is not what the plan moves",
                key=name,
                got=f"{tuple(shard.shape)}, {shard.dtype}",
                allowed=f"{shape}, {self._dtype(entry)}",
            )
        return shard

    def _dtype(self, entry: Entry) -> torch.dtype:
        return self.dtypes.get(entry.weight.name, self.dtype)

    def _counted(self, tensor: Tensor) -> Tensor:
        self._held += tensor.numel() * tensor.element_size()
        self.peak_bytes = max(self.peak_bytes, self._held)
        return tensor

    def _job(self, entry: Entry) -> _Job:
        if id(entry) not in self._jobs:
            self._jobs[id(entry)] = _job_of(entry, self.rank)
        return self._jobs[id(entry)]

    def _sizes(self, entry: Entry) -> np.ndarray:
        """Most bytes that any rank receives, stages, and then holds of one of an entry's weights."""
        if id(entry) not in self._known_sizes:
            self._known_sizes[id(entry)] = entry.weight.num_bytes * np.array(_shares(entry))
        return self._known_sizes[id(entry)]


def _in_one_piece(message: list[Tensor]) -> bool:
    return len(message) == 1 and message[0].is_contiguous()


def _places(message: list[Tensor], memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part, and its place in the memory of `Resharder._rooms`; none where it is that memory."""
    if _in_one_piece(message):
        return
    for part, place in zip(message, memory.split([part.numel() for part in message])):
        yield part, place.view(part.shape)


def _messages(parts: list[Tensor]) -> list[list[Tensor]]:
    """Small parts as one message, each other part as one of its own."""
    small = [part for part in parts if part.nbytes <= SMALL]
    large = [[part] for part in parts if part.nbytes > SMALL]
    return [small, *large] if small else large


def _shares(entry: Entry) -> tuple[float, float, float]:
    """Of one of its weights, the most that any rank receives, stages on the way, and holds in the end."""
    routes, world = entry.routes, len(entry.routes.kept)
    crosses = entry.source.axis != entry.target.axis
    ours, theirs = (entry.target.axis, entry.source.axis) if crosses else (entry.source.axis, entry.target.axis)
    is_small = routes.share * entry.weight.num_bytes <= SMALL
    sent, received = (
        np.bincount(rank, routes.share * (is_small | (axis > 0)), world)
        for rank, axis in ((routes.sender, ours), (routes.receiver, theirs))
    )
    arriving = np.bincount(routes.receiver, routes.share, world)
    return float(arriving.max()), float((sent + received).max()), float(routes.needed.max())


def _job_of(entry: Entry, rank: int) -> _Job:
    routes, source, target = entry.routes, entry.source, entry.target
    held, needed = int(source.index[rank]), int(target.index[rank])
    sends = [
        (int(routes.receiver[part]), _cuts(entry, int(routes.source[part]), int(routes.target[part]))[0])
        for part in np.flatnonzero(routes.sender == rank)
    ]
    receives = [
        (int(routes.sender[part]), _cuts(entry, int(routes.source[part]), int(routes.target[part]))[1])
        for part in np.flatnonzero(routes.receiver == rank)
    ]
    keeps = _cuts(entry, held, needed) if min(held, needed) >= 0 and routes.kept[rank] > 0 else None
    shape = _piece_shape(entry, target, needed) if needed >= 0 else ()
    return _Job(needed >= 0, sends, receives, keeps, shape)


def _piece_shape(entry: Entry, division: Division, piece: int) -> tuple[int, ...]:
    low, high = division.span(piece)
    shape = list(entry.weight.shape)
    shape[division.axis] = high - low
    return tuple(shape)


def _cuts(entry: Entry, source_piece: int, target_piece: int) -> tuple[Cut, Cut]:
    """The slices of the common part of two pieces: in the training shard, and in the sampling shard."""
    ours, theirs = entry.source.span(source_piece), entry.target.span(target_piece)
    axes = len(entry.weight.shape)
    if entry.source.axis == entry.target.axis:
        low, high = max(ours[0], theirs[0]), min(ours[1], theirs[1])
        return (
            _along(axes, entry.source.axis, low - ours[0], high - ours[0]),
            _along(axes, entry.target.axis, low - theirs[0], high - theirs[0]),
        )
    return _along(axes, entry.target.axis, *theirs), _along(axes, entry.source.axis, *ours)


def _along(axes: int, axis: int, start: int, stop: int) -> Cut:
    cut = [slice(None)] * axes
    cut[axis] = slice(start, stop)
    return tuple(cut)
