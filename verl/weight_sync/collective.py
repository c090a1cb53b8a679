"""Weights by broadcast in a process group: from one trainer to any number of samplers (gloo on CPU, NCCL on GPUs).

Every rank of the group takes part: the source sends, all others receive. A piece of a bucket is a frame that says what
comes, and then the bytes: large weights go straight out of the trainer's memory, small ones as one message. Where they
arrive three buffers take turns, so that one is emptied while another one is filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from verl.distributed.store import gloo_group, meet
from verl.errors import RolloutError
from verl.outcomes import on_error
from verl.weight_sync.chunks import WeightChunk, pieces
from verl.weight_sync.transport import PeerFailedError, Transport
from verl.weight_sync.wire import MAX_HEADER, ChunkLayout, chunk_of

GAVE_UP = -1
HERE = "verl-sampler-is-here"
"""Key in the store of a pair by which the sampler tells that it is there."""
LENGTH = 8
LOCALHOST = "127.0.0.1"
PIECE_BYTES = 16 << 20
"""What one frame describes, or one larger tensor."""
FRAME_BYTES = 16 << 10
"""Length of a header and the header; what has no room there comes next."""
LARGE_BYTES = 256 << 10
"""A weight of at least this size is a message of its own."""
MESSAGE_BYTES = 2 << 20
"""A longer message goes in parts."""
BUFFERS = 3


class BroadcastTransport(Transport):
    """One rank of a group over which weights are broadcast.

    Args:
        group: of torch.distributed, or a backend of it that stands alone (`join`); None is the group of all.
        source: the sending rank, counted in the group.
        device: of the buffers; must suit the group's backend.

    Example:
        >>> BroadcastTransport(group, source=0, device="cuda").send(chunk_weights(engine.export_weights(), size, 3))
    """

    not_options: ClassVar[tuple[str, ...]] = ("group", "source")

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        source: int = 0,
        device: str | torch.device = "cpu",
        timeout: float = 300.0,
    ):
        super().__init__(timeout)
        self.group, self.source, self.device = group, source, torch.device(device)
        self._connect: Callable[[], Any] | None = None
        self._place = ""
        self._is_alone = False
        self._buffers: list[torch.Tensor] = []

    @classmethod
    def join(
        cls,
        address: str,
        rank: int,
        world_size: int,
        device: str = "cpu",
        timeout: float = 300.0,
    ) -> BroadcastTransport:
        """Make a process group of its own, independent of the groups that the process is in.

        Args:
            address: ``host:port`` at which rank 0, the source, listens.
        """
        limit = timedelta(seconds=timeout)
        host, _, port = address.rpartition(":")
        store = meet(host, int(port), world_size, rank == 0, limit)
        return cls(_group(store, rank, world_size, device, host, limit), 0, device, timeout)

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cpu", host: str = LOCALHOST, **options: Any) -> BroadcastTransport:
        """The source of a pair; the group is made when the first weights are sent.

        Args:
            host: address of this machine for the sampler, and the only one that is listened on.
        """
        end = cls(None, 0, device, **options)
        limit = timedelta(seconds=end.timeout)
        store = meet(host, 0, 2, True, limit, waits=False)
        end._place = f"{host}:{store.port}"

        def connect() -> dist.ProcessGroup:
            end.wait_until(lambda: store.check([HERE]), "the sampler to join the group that weights are broadcast in")
            return _group(store, 0, 2, device, host, limit)

        end._connect = connect
        return end

    @classmethod
    def reach(cls, address: Mapping[str, Any], device: str = "cpu") -> BroadcastTransport:
        host, _, port = str(address["place"]).rpartition(":")
        end = cls(None, 0, device, float(address["timeout"]))
        limit = timedelta(seconds=end.timeout)
        store = meet(host, int(port), 2, False, limit, waits=False)
        store.set(HERE, "")
        end._connect = partial(_group, store, 1, 2, device, host, limit)
        return end

    @property
    def address(self) -> dict[str, Any]:
        return {"place": self._place, "timeout": self.timeout}

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        num_bytes = number = 0
        ended = False
        under_way: deque[list[Broadcast]] = deque()

        def give_up(_: BaseException) -> None:
            with suppress(RolloutError):
                while under_way:
                    _wait(under_way.popleft())
                if not ended and not self._is_alone:
                    self._start(self._frame(GAVE_UP)).wait()

        with on_error(give_up):
            for chunk in chunks:
                for piece in pieces(chunk, PIECE_BYTES):
                    if len(under_way) == BUFFERS - 1:
                        _wait(under_way.popleft())
                    under_way.append(self._send(piece, number % BUFFERS))
                    number += 1
                num_bytes, ended = num_bytes + chunk.num_bytes, chunk.last
                while under_way:  # the source may use the memory of a chunk for the next one
                    _wait(under_way.popleft())
                del chunk, piece  # before the next one is made
            if not ended:
                raise RolloutError("the stream of weights was interrupted")
        return num_bytes

    def receive(self) -> Iterator[WeightChunk]:
        number = 0
        coming: PendingReceive | None = self._next(self._start(self._frame()), 0)
        try:
            while coming is not None:
                _wait(coming.parts)
                here = coming
                number += 1
                coming = self._next(here.frame, number)  # on its way while this one is used
                yield chunk_of(here.layout, here.body)
        except GeneratorExit:  # the rest is dropped, but the broadcast is collective: the other ranks take part in it
            with suppress(RolloutError):
                while coming is not None:
                    _wait(coming.parts)
                    number += 1
                    coming = self._next(coming.frame, number)
            raise

    def close(self) -> None:
        self._buffers = []

    def _send(self, piece: WeightChunk, which: int) -> list[Broadcast]:
        """Start on a piece; small weights, and those that are not contiguous, go by way of one of the buffers."""
        layout = ChunkLayout.of(piece)
        tensors = [tensor.detach() for _, tensor in piece.tensors]
        direct = [_is_direct(tensor, self.device) for tensor in tensors]
        staged = [place for place, straight in zip(layout.entries, direct) if not straight]
        room = self._room(which, max((e.offset + e.num_bytes for e in staged), default=0))
        for place, tensor, straight in zip(layout.entries, tensors, direct):
            if not straight:
                value = room[place.offset : place.offset + place.num_bytes].view(place.dtype).view(place.shape)
                value.copy_(tensor, non_blocking=True)
        text = layout.encode()
        frame = self._frame(len(text), text)
        messages = [frame[:FRAME_BYTES], frame[FRAME_BYTES:]]
        for first, last in _runs(layout):
            message = tensors[first].view(-1).view(torch.uint8) if direct[first] else room[_span(layout, first, last)]
            messages.append(message)
        return self._start_all(messages)

    def _next(self, frame: Broadcast | None, number: int) -> PendingReceive | None:
        """What comes after a piece, already on its way, with the frame of what comes after that; None at the end."""
        if frame is None:
            return None
        layout = self._layout(frame)
        body = self._room(number % BUFFERS, layout.num_bytes)
        parts = self._start_all([body[_span(layout, *run)] for run in _runs(layout)])
        return PendingReceive(layout, body, parts, None if layout.last else self._start(self._frame()))

    def _layout(self, frame: Broadcast) -> ChunkLayout:
        frame.wait()
        length = int(frame.tensor[:LENGTH].view(torch.int64))
        if length == GAVE_UP:
            raise PeerFailedError("the trainer gave up in the middle of a transfer of weights")
        if not 0 < length <= MAX_HEADER:
            raise RolloutError("a header of weights has an impossible length", got=length)
        rest = torch.empty(max(0, LENGTH + length - FRAME_BYTES), dtype=torch.uint8, device=self.device)
        _wait(self._start_all([rest]))
        text = torch.cat([frame.tensor, rest])[LENGTH : LENGTH + length]
        return ChunkLayout.decode(text.cpu().numpy().tobytes())[0]

    def _frame(self, length: int = 0, text: bytes = b"") -> torch.Tensor:
        """A frame, and behind it what of the header has no room there; the receiver's is empty."""
        content = length.to_bytes(LENGTH, "little", signed=True) + text
        return torch.frombuffer(bytearray(content.ljust(FRAME_BYTES)), dtype=torch.uint8).to(self.device)

    def _start_all(self, messages: list[torch.Tensor]) -> list[Broadcast]:
        return [self._start(part) for message in messages for part in message.split(MESSAGE_BYTES)]

    def _start(self, tensor: torch.Tensor) -> Broadcast:
        if not tensor.numel():
            return Broadcast(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.source, 0
        if self._connect is not None:
            self._is_alone = True  # until the others are met
            try:
                self.group, self._connect = self._connect(), None
            except dist.DistError as error:
                raise RolloutError(f"weight transfer: the group was not formed: {_first_line(error)}") from error
            self._is_alone = False
        group: Any = dist.group.WORLD if self.group is None else self.group
        return Broadcast(tensor, group.broadcast([tensor], options))

    def _room(self, which: int, num_bytes: int) -> torch.Tensor:
        self._buffers += [torch.empty(0, dtype=torch.uint8, device=self.device)] * (which + 1 - len(self._buffers))
        if self._buffers[which].numel() < num_bytes:
            self._buffers[which] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffers[which][:num_bytes]


@dataclass
class Broadcast:
    """A broadcast that is under way."""

    tensor: torch.Tensor
    work: Any = None

    def wait(self) -> None:
        """Until the tensor was sent, or has arrived.

        Raises:
            RolloutError: the group broke, or the other ranks timed out.
        """
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise RolloutError(
                f"weight transfer: the broadcast failed: {_first_line(error)}",
                fix="Did the process at the other end die? Its log says more.",
            ) from error


@dataclass
class PendingReceive:
    """A piece that is on its way, and the frame of the next one."""

    layout: ChunkLayout
    body: torch.Tensor
    parts: list[Broadcast]
    frame: Broadcast | None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _wait(parts: list[Broadcast]) -> None:
    for part in parts:
        part.wait()


def _runs(layout: ChunkLayout) -> Iterator[tuple[int, int]]:
    """The messages of a piece, by their first and last weight: large weights alone, small ones together."""
    begin = 0
    for number, entry in enumerate(layout.entries):
        if entry.num_bytes >= LARGE_BYTES:
            if begin < number:
                yield begin, number - 1
            yield number, number
            begin = number + 1
    if begin < len(layout.entries):
        yield begin, len(layout.entries) - 1


def _span(layout: ChunkLayout, first: int, last: int) -> slice:
    """Where the bytes of adjacent weights lie."""
    end = layout.entries[last]
    return slice(layout.entries[first].offset, end.offset + end.num_bytes)


def _is_direct(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a weight is sent in place, without staging."""
    return tensor.nbytes >= LARGE_BYTES and tensor.is_contiguous() and tensor.device == device


def _group(store: dist.Store, rank: int, world_size: int, device: str, host: str, limit: timedelta) -> Any:
    """A group independent of the groups that the process is in."""
    named = dist.PrefixStore("verl-weights", store)
    if not device.startswith("cuda"):
        return gloo_group(named, rank, world_size, host, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(named, rank, world_size, options)
