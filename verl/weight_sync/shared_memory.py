"""Weights through shared memory of one machine: a ring of slots that one process fills and another empties.

While the reader copies one slot into its model the writer fills the next, so the two copies overlap. Each slot has a
state word, written last, by which the ends take turns; there is no lock that a dying process could keep.
"""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl.errors import RolloutError
from verl.outcomes import on_error
from verl.weight_sync.chunks import WeightChunk, pieces
from verl.weight_sync.transport import PeerFailedError, Transport
from verl.weight_sync.wire import ChunkLayout, chunk_of, write_into

EMPTY, FULL, GAVE_UP = 0, 1, 2
"""States of a slot."""
CONTROL = 64
"""Bytes in front of a slot: words of 8 bytes."""
STATE, LENGTH, REFUSED = 0, 1, 2
"""Words: the state of the slot, the length of its header; in the first slot whether the reader has given up, which the
reader alone writes."""
HEADER_SHARE = 1 << 20
"""Bytes of a slot for the header."""
SLOTS = 3
PREFIX = "verl-weights-"
"""How the names of such memory begin."""
PIECE_BYTES = 2 << 20
"""A slot is passed on as soon as it holds so much; the same cached memory is used again and again."""


class SharedMemoryTransport(Transport):
    """One end of a ring. The end that is made without a path owns the memory and removes it.

    An end that raised is of no use any more: close both and make new ones.

    Args:
        path: of the other end's memory (`address`); None makes new memory, which only this user can open.
        bucket_bytes: largest chunk; a larger tensor is an error that names this setting.

    Raises:
        RolloutError: no room for the memory, or the other end's has another size.

    Example:
        >>> ours = SharedMemoryTransport(bucket_bytes=512 << 20)
        >>> theirs = SharedMemoryTransport(**ours.address)  # in the sampler's process
    """

    not_options: ClassVar[tuple[str, ...]] = ("path",)

    keeps_bodies: ClassVar[bool] = True
    """Whether the slots hold the bodies of chunks next to their headers."""

    def __init__(self, path: str | None = None, bucket_bytes: int = 512 << 20, timeout: float = 300.0):
        super().__init__(timeout)
        self.bucket_bytes = -(-bucket_bytes // CONTROL) * CONTROL
        self._slot_bytes = CONTROL + HEADER_SHARE + (self.bucket_bytes if self.keeps_bodies else 0)
        self._is_owner = path is None
        self._next, self._unlinks = 0, False
        if path is None:
            folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
            handle, self.path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        else:
            self.path, handle = path, _open_theirs(path)
        try:
            if self._is_owner:
                reserve(handle, self.path, SLOTS * self._slot_bytes)
            if os.fstat(handle).st_size != SLOTS * self._slot_bytes:
                raise RolloutError("the two ends disagree on the bucket size", key="bucket_bytes", got=bucket_bytes)
            self._memory = mmap.mmap(handle, SLOTS * self._slot_bytes)
        finally:
            os.close(handle)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._words = memoryview(self._memory).cast("q")  # polled often, and a tensor of one number is slow

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cpu", **options: Any) -> SharedMemoryTransport:
        return cls(bucket_bytes=bucket_bytes, **options)

    @classmethod
    def reach(cls, address: Mapping[str, Any], device: str = "cpu") -> SharedMemoryTransport:
        """The memory's name goes as soon as both ends have it: a process that is killed later leaves nothing behind."""
        end = cls(**address)
        end._unlinks = True
        Path(end.path).unlink(missing_ok=True)
        return end

    @property
    def address(self) -> dict[str, Any]:
        return {"path": self.path, "bucket_bytes": self.bucket_bytes}

    def _give_up(self) -> None:
        with suppress(RolloutError):
            self._await(EMPTY)
            self._set(self._next, STATE, GAVE_UP)

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        num_bytes = 0
        with on_error(lambda _: self._give_up()):
            for chunk in chunks:
                for piece in pieces(chunk, min(PIECE_BYTES, self.bucket_bytes)):
                    self._fill(piece)
                num_bytes += chunk.num_bytes
                del chunk, piece  # before the next one is made
        for number in range(SLOTS):
            self._wait(lambda: self._get(number, STATE) != FULL, "the sampler to take the last weights")  # noqa: B023
        return num_bytes

    def receive(self) -> Iterator[WeightChunk]:
        ended = False
        try:
            while not ended:
                self._await(FULL, GAVE_UP)
                number = self._next
                if self._get(number, STATE) == GAVE_UP:
                    raise PeerFailedError("the trainer gave up in the middle of a transfer of weights")
                layout, body = self._read(number)
                yield chunk_of(layout, body)
                ended = layout.last
                self._settle(body)
                self._set(number, STATE, EMPTY)
                self._next = (number + 1) % SLOTS
        finally:
            if not ended:
                self._set(0, REFUSED, 1)

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._words.release()
        with suppress(BufferError):  # another view is still alive: the memory goes with it
            self._memory.close()
        if self._is_owner:
            Path(self.path).unlink(missing_ok=True)

    def _read(self, number: int) -> tuple[ChunkLayout, torch.Tensor]:
        header, body = self._slot(number)
        length = self._get(number, LENGTH)
        if not 0 < length <= HEADER_SHARE:
            raise RolloutError("a header of weights has an impossible length", got=length)
        return ChunkLayout.decode(header[:length].numpy().tobytes())[0], body

    def _fill(self, chunk: WeightChunk) -> None:
        layout = ChunkLayout.of(chunk)
        if layout.num_bytes > self.bucket_bytes:
            raise RolloutError(
                "a weight is larger than a bucket of shared memory",
                key="update_weights_bucket_megabytes",
                got=layout.num_bytes,
                allowed=f"at most {self.bucket_bytes}",
            )
        self._await(EMPTY)
        header, body = self._slot(self._next)
        text = layout.encode()
        if len(text) > HEADER_SHARE:
            raise RolloutError("too many weights in one bucket", key="update_weights_bucket_megabytes", got=len(text))
        header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        write_into(chunk, layout, body)
        for _, tensor in chunk.tensors[:1]:
            self._settle(tensor)
        self._set(self._next, LENGTH, len(text))
        self._set(self._next, STATE, FULL)
        self._next = (self._next + 1) % SLOTS

    @staticmethod
    def _settle(tensor: torch.Tensor) -> None:
        """Wait for the copies to or from a tensor that may be under way on its device."""
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def _await(self, *states: int) -> None:
        other = "sampler" if EMPTY in states else "trainer"
        self._wait(lambda: self._get(self._next, STATE) in states, f"the {other} at the other end of shared memory")

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.wait_until(lambda: ready() or self._get(0, REFUSED) != 0, what)
        if self._get(0, REFUSED):
            raise PeerFailedError("the sampler did not accept the weights", fix="The sampler's own error says why.")

    def _slot(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Header and body of a slot."""
        first = number * self._slot_bytes + CONTROL
        return self._bytes[first : first + HEADER_SHARE], self._bytes[first + HEADER_SHARE :][: self.bucket_bytes]

    def _get(self, number: int, word: int) -> int:
        """A control word of a slot."""
        return self._words[number * self._slot_bytes // 8 + word]

    def _set(self, number: int, word: int, value: int) -> None:
        self._words[number * self._slot_bytes // 8 + word] = value


def _open_theirs(path: str) -> int:
    """A handle of the other end's memory, which may be removed by its name: nothing else is taken for it.

    Raises:
        RolloutError: it is no such memory, or not this user's alone.
    """
    if not Path(path).name.startswith(PREFIX):
        raise RolloutError("not the name of a memory for weights", key="path", got=path)
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    there = os.fstat(handle)
    if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
        os.close(handle)
        raise RolloutError("the memory for weights is not this user's alone", key="path", got=path)
    return handle


def reserve(handle: int, path: str, num_bytes: int) -> None:
    """Take the room of a new file now: where there is none, that is an error here and not a crash at a later write.

    Raises:
        RolloutError: no room; the file is removed.
    """
    try:
        os.posix_fallocate(handle, 0, max(1, num_bytes))
    except OSError as error:
        Path(path).unlink(missing_ok=True)
        raise RolloutError(
            f"no room for weights in shared memory: {error.strerror}",
            key="update_weights_bucket_megabytes",
            got=f"{num_bytes} bytes in {Path(path).parent}",
            fix="Make the bucket smaller, or more room there (docker run --shm-size).",
        ) from error
