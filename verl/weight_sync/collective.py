"""Weights by broadcast in a process group: from one trainer to any number of samplers (gloo on CPU, NCCL on GPUs).

Every rank of the group takes part: the source sends, all others receive. Each bucket is one broadcast, which ends with
the lengths of the next one. Three buffers per side take turns: while one is on its way the trainer fills another, and
the sampler empties another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from verl.errors import RolloutError
from verl.weight_sync.chunks import WeightChunk, pieces
from verl.weight_sync.transport import OtherEndError, Transport
from verl.weight_sync.wire import ALIGNMENT, MAX_HEADER, Layout, chunk_of, write_into

GAVE_UP = -1
LOCALHOST = "127.0.0.1"
PIECE_BYTES = 16 << 20
"""A broadcast takes so much at once, or one larger tensor."""
BUFFERS = 3
TAIL = 16
"""Bytes at the end of a message: lengths of the next one, none after the last."""


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
        group: Any = None,
        source: int = 0,
        device: str | torch.device = "cpu",
        timeout: float = 300.0,
    ):
        super().__init__(timeout)
        self.group, self.source, self.device = group, source, torch.device(device)
        self._connect: Callable[[], Any] | None = None
        self._place = ""
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]

    @classmethod
    def join(
        cls, address: str, rank: int, world_size: int, device: str = "cpu", timeout: float = 300.0
    ) -> BroadcastTransport:
        """Make a group of its own, beside whatever groups the process is in.

        Args:
            address: ``host:port`` at which rank 0, the source, listens.
        """
        limit = timedelta(seconds=timeout)
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=limit)
        return cls(_group(store, rank, world_size, device, limit), 0, device, timeout)

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cpu", host: str = LOCALHOST, **options: Any) -> BroadcastTransport:
        """The source of a pair; the group is made when the first weights are sent.

        Args:
            host: address of this machine for the sampler.
        """
        end = cls(None, 0, device, **options)
        limit = timedelta(seconds=end.timeout)
        store = dist.TCPStore(host, 0, 2, is_master=True, timeout=limit, wait_for_workers=False)
        end._place = f"{host}:{store.port}"
        end._connect = partial(_group, store, 0, 2, device, limit)
        return end

    @classmethod
    def reach(cls, address: Mapping[str, Any], device: str = "cpu") -> BroadcastTransport:
        host, _, port = str(address["place"]).rpartition(":")
        end = cls(None, 0, device, float(address["timeout"]))
        limit = timedelta(seconds=end.timeout)
        store = dist.TCPStore(host, int(port), 2, is_master=False, timeout=limit, wait_for_workers=False)
        end._connect = partial(_group, store, 1, 2, device, limit)
        return end

    @property
    def address(self) -> dict[str, Any]:
        return {"place": self._place, "timeout": self.timeout}

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        num_bytes = number = 0
        under_way, ready = Broadcast(), self._numbers(0, 0)
        try:
            for chunk in chunks:
                for piece in pieces(chunk, PIECE_BYTES):
                    message = self._packed(piece, number % BUFFERS)  # while the one before the last is on its way
                    under_way = self._after(under_way, ready, message)
                    ready, number = message.whole, number + 1
                num_bytes += chunk.num_bytes
                del chunk, piece  # before the next one is made
            under_way = self._after(under_way, ready, None)
            under_way.wait()
        except BaseException:
            with suppress(RolloutError):
                ready[-TAIL:].view(torch.int64).copy_(self._numbers(GAVE_UP, 0).view(torch.int64))
                under_way.wait()
                self._start(ready).wait()
            raise
        return num_bytes

    def receive(self) -> Iterator[WeightChunk]:
        first = self._start(self._numbers(0, 0))
        number, coming = 0, self._next(first, 0)
        here: WeightChunk | None = None
        try:
            while coming is not None:
                coming.wait()
                layout = _layout(coming)
                here = chunk_of(layout, coming.tensor[coming.header_bytes :])
                number += 1
                coming = self._next(coming, number % BUFFERS)  # on its way while this one is used
                if layout.last != (coming is None):
                    raise RolloutError("a stream of weights does not end where it says so")
                yield here
        except GeneratorExit:
            self._drain(coming, number)
            raise

    def close(self) -> None:
        self._buffers = [buffer[:0].clone() for buffer in self._buffers]

    def _packed(self, piece: WeightChunk, which: int) -> Message:
        """Header, tensors and room for the lengths of the next message, in one of the buffers."""
        layout = Layout.of(piece)
        text = layout.encode()
        text += b" " * (-len(text) % ALIGNMENT)
        whole = self._room(which, len(text) + layout.num_bytes + TAIL)
        whole[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        write_into(piece, layout, whole[len(text) : -TAIL])
        return Message(whole, len(text))

    def _after(self, under_way: Broadcast, ready: torch.Tensor, following: Message | None) -> Broadcast:
        """Send what is ready, with the lengths of what follows, once the one before it has gone."""
        lengths = (0, 0) if following is None else (following.header_bytes, following.whole.numel())
        ready[-TAIL:].view(torch.int64).copy_(self._numbers(*lengths).view(torch.int64))
        under_way.wait()
        return self._start(ready)

    def _next(self, before: Broadcast, which: int) -> Broadcast | None:
        """What comes after a message that has arrived, already on its way; None at the end."""
        before.wait()
        header_bytes, num_bytes = (int(x) for x in before.tensor[-TAIL:].view(torch.int64))
        if header_bytes == GAVE_UP:
            raise OtherEndError("the trainer gave up in the middle of a transfer of weights")
        if not num_bytes:
            return None
        if not 0 < header_bytes <= min(MAX_HEADER, num_bytes - TAIL) or header_bytes % ALIGNMENT:
            raise RolloutError("a header of weights has an impossible length", got=header_bytes)
        coming = self._start(self._room(which, num_bytes))
        coming.header_bytes = header_bytes
        return coming

    def _drain(self, coming: Broadcast | None, number: int) -> None:
        """The rest of a stream of which nothing is wanted any more: the other ranks take part in it."""
        with suppress(RolloutError):
            while coming is not None:
                number += 1
                coming = self._next(coming, number % BUFFERS)

    def _start(self, tensor: torch.Tensor) -> Broadcast:
        if not tensor.numel():
            return Broadcast(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.source, 0
        if self._connect is not None:
            self.group, self._connect = self._connect(), None
        group: Any = dist.group.WORLD if self.group is None else self.group
        return Broadcast(tensor, group.broadcast([tensor], options))

    def _numbers(self, *values: int) -> torch.Tensor:
        """Lengths of a message: its header and the whole of it."""
        return torch.tensor(values, dtype=torch.int64, device=self.device).view(torch.uint8)

    def _room(self, which: int, num_bytes: int) -> torch.Tensor:
        if self._buffers[which].numel() < num_bytes:
            self._buffers[which] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffers[which][:num_bytes]


@dataclass
class Message:
    """What is sent at once: header, tensors, lengths of the next message."""

    whole: torch.Tensor
    header_bytes: int


@dataclass
class Broadcast:
    """A broadcast that is under way."""

    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    work: Any = None
    header_bytes: int = 0

    def wait(self) -> None:
        """Until the tensor was sent, or has arrived.

        Raises:
            RolloutError: the group broke, or the other ranks were not heard of in time.
        """
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise RolloutError(
                f"weight transfer: the broadcast failed: {str(error).splitlines()[0][:200]}",
                fix="Did the process at the other end die? Its log says more.",
            ) from error


def _layout(message: Broadcast) -> Layout:
    return Layout.decode(message.tensor[: message.header_bytes].cpu().numpy().tobytes())[0]


def _group(store: dist.Store, rank: int, world_size: int, device: str, limit: timedelta) -> Any:
    """A group beside whatever groups the process is in."""
    named = dist.PrefixStore("verl-weights", store)
    if not device.startswith("cuda"):
        return dist.ProcessGroupGloo(named, rank, world_size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(named, rank, world_size, options)
