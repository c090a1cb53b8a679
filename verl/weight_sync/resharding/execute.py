"""Carry out a plan: batch by batch, each part from its holder to the rank that lacks it.

A batch never crosses a layer, so a rank holds at most one layer of sampling weights besides its own, plus the parts
that have to be laid out anew on their way (those cut along another axis than the first). A message costs as much as a
hundred kilobytes, so the small parts that one rank has for another one in a batch travel as one.
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
"""Parts of at most that many bytes travel together, as far as a share of the bucket has room for them."""
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
        rank: this process's number in the plan.
        dtype: of all shards on both sides, but those of ``dtypes``.
        dtypes: name of a weight's template -> its own.
        device: where the sampling shards are made.
        group: a process group in which ranks have the plan's numbers; null: the default one.
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
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.plan, self.rank, self.group = plan, rank, group
        self.dtype, self.device, self.bucket_bytes = dtype, torch.device(device), bucket_bytes
        self.dtypes = dict(dtypes or {})
        self.sent_bytes = self.peak_bytes = self._held = 0
        self._jobs: dict[int, _Job] = {}
        self._batches: list[Batch] | None = None

    def batches(self) -> Iterator[Batch]:
        """The same batches on every rank; a new one starts with each layer, and where the bucket is full."""
        weights: list[tuple[str, Entry]] = []
        size, number, last = 0, 0, None
        for layer, name, entry in self.plan.expanded():
            arriving = int(entry.weight.num_bytes * _most(entry))
            if weights and (layer != last or size + arriving > self.bucket_bytes):
                yield Batch(number, weights)
                weights, size, number = [], 0, number + 1
            weights.append((name, entry))
            size, last = size + arriving, layer
        if weights:
            yield Batch(number, weights)

    def run(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Exchange everything; all ranks of the plan iterate at once.

        Args:
            read: this rank's training shard of a weight; asked only for weights of which it holds a piece. It may not
                change until the next batch begins.

        Yields:
            name and sampling shard of every weight that this rank needs. A shard that it holds already is given as it
            is, without a copy.

        Raises:
            EngineError: a shard that has another shape than the plan says.
        """
        if self._batches is None:
            self._batches = list(self.batches())
        for batch in self._batches:
            self._held = 0
            yield from self._exchange(batch, read)

    def _exchange(self, batch: Batch, read: Callable[[str], Tensor]) -> list[tuple[str, Tensor]]:
        leaving: _Parts = defaultdict(list)
        arriving: _Parts = defaultdict(list)
        found: list[tuple[str, Tensor]] = []
        for name, entry in batch.weights:
            job = self._job(entry)
            ours = self._shard(read, name, entry)
            for receiver, cut in job.sends:
                assert ours is not None
                leaving[receiver, ours.dtype].append(ours[cut])
            if not job.needs:
                continue
            if job.keeps and not job.receives:
                assert ours is not None
                found.append((name, ours[job.keeps[0]]))
                continue
            target = self._counted(torch.empty(job.shape, dtype=self._dtype(entry), device=self.device))
            for sender, cut in job.receives:
                arriving[sender, target.dtype].append(target[cut])
            if job.keeps and ours is not None:
                target[job.keeps[1]].copy_(ours[job.keeps[0]])
            found.append((name, target))
        self._travel(leaving, arriving)
        return found

    def _travel(self, leaving: _Parts, arriving: _Parts) -> None:
        """Send and receive the parts of a batch; both sides list what goes from one to the other in one order."""
        operations: list[dist.P2POp] = []
        after: list[tuple[list[Tensor], Tensor]] = []
        most = self.bucket_bytes // (4 * self.plan.sampling.world)  # with all others, half a bucket both ways
        for (sender, _), places in arriving.items():  # first, so that nobody waits for room to send to
            for message in _messages(places, most):
                taken = message[0]
                if len(message) > 1 or not taken.is_contiguous():
                    taken = self._beside(message)
                    after.append((message, taken))
                operations.append(dist.P2POp(dist.irecv, taken, group=self.group, group_peer=sender))
        for (receiver, _), parts in sorted(leaving.items(), key=self._turn):
            for message in _messages(parts, most):
                self.sent_bytes += sum(part.nbytes for part in message)
                sent = message[0]
                if len(message) > 1 or not sent.is_contiguous():
                    sent = self._beside(message)
                    for part, place in _places(message, sent):
                        place.copy_(part)
                operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=receiver))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        for message, taken in after:
            for place, arrived in _places(message, taken):
                place.copy_(arrived)

    def _turn(self, leaving: tuple[tuple[int, torch.dtype], list[Tensor]]) -> int:
        """Each rank begins with its next neighbour, or all would send to rank 0 at once, then to rank 1."""
        return (leaving[0][0] - self.rank) % self.plan.sampling.world

    def _beside(self, message: list[Tensor]) -> Tensor:
        """Memory in which the parts of a message lie one behind the other."""
        size = sum(part.numel() for part in message)
        return self._counted(torch.empty(size, dtype=message[0].dtype, device=message[0].device))

    def _shard(self, read: Callable[[str], Tensor], name: str, entry: Entry) -> Tensor | None:
        piece = int(entry.source.index[self.rank])
        if piece < 0:
            return None
        ours = read(name)
        shape = _piece_shape(entry, entry.source, piece)
        if tuple(ours.shape) != shape or ours.dtype != self._dtype(entry):
            raise EngineError(
                "the training shard is not what the plan moves",
                key=name,
                got=f"{tuple(ours.shape)}, {ours.dtype}",
                allowed=f"{shape}, {self._dtype(entry)}",
            )
        return ours

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


def _places(message: list[Tensor], memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part, and its place in the memory of `Resharder._beside`."""
    for part, place in zip(message, memory.split([part.numel() for part in message])):
        yield part, place.view(part.shape)


def _messages(parts: list[Tensor], most: int) -> list[list[Tensor]]:
    """Small parts of together at most ``most`` bytes as one message, each other part as one of its own."""
    together: list[Tensor] = []
    alone: list[list[Tensor]] = []
    for part in parts:
        fits = part.nbytes <= SMALL and sum(other.nbytes for other in together) + part.nbytes <= most
        if fits:
            together.append(part)
        else:
            alone.append([part])
    return [together, *alone] if together else alone


def _most(entry: Entry) -> float:
    """The largest share of one of its weights that any rank receives."""
    routes = entry.routes
    return float(np.bincount(routes.receiver, routes.share, len(routes.kept)).max())


def _job_of(entry: Entry, rank: int) -> _Job:
    routes, source, target = entry.routes, entry.source, entry.target
    ours, wanted = int(source.index[rank]), int(target.index[rank])
    sends = [
        (int(routes.receiver[part]), _cuts(entry, int(routes.source[part]), int(routes.target[part]))[0])
        for part in np.flatnonzero(routes.sender == rank)
    ]
    receives = [
        (int(routes.sender[part]), _cuts(entry, int(routes.source[part]), int(routes.target[part]))[1])
        for part in np.flatnonzero(routes.receiver == rank)
    ]
    keeps = _cuts(entry, ours, wanted) if min(ours, wanted) >= 0 and routes.kept[rank] > 0 else None
    shape = _piece_shape(entry, target, wanted) if wanted >= 0 else ()
    return _Job(wanted >= 0, sends, receives, keeps, shape)


def _piece_shape(entry: Entry, division: Division, piece: int) -> tuple[int, ...]:
    low, high = division.span(piece)
    shape = list(entry.weight.shape)
    shape[division.axis] = high - low
    return tuple(shape)


def _cuts(entry: Entry, piece: int, wanted: int) -> tuple[Cut, Cut]:
    """Where the common part of two pieces lies in the training shard, and where in the sampling shard."""
    ours, theirs = entry.source.span(piece), entry.target.span(wanted)
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
