"""Weights that live in shared memory: the trainer writes them where the sampler reads them, with one copy in all.

Each bucket of a stream has a segment of its own, made when it comes for the first time and mapped by both ends from
then on. A receiver that can keeps the tensors as its own weights (`WeightChunk.lasts`); for one that cannot the ring of
`shared_memory` needs less memory. The trainer begins to write only when the receiver has asked for the stream, which a
sampler does once nothing is sampled any more.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from verl.errors import RolloutError
from verl.weight_sync.chunks import WeightChunk
from verl.weight_sync.shared_memory import WANTED, SharedMemoryTransport, reserve
from verl.weight_sync.wire import ChunkLayout


class ResidentTransport(SharedMemoryTransport):
    """One end of weights in shared memory; see `SharedMemoryTransport`.

    Example:
        >>> ours = ResidentTransport(bucket_bytes=512 << 20)
        >>> theirs = ResidentTransport(**ours.address)  # in the sampler's process
    """

    keeps_bodies = False
    lasts = True

    def __init__(self, path: str | None = None, bucket_bytes: int = 512 << 20, timeout: float = 300.0):
        super().__init__(path, bucket_bytes, timeout)
        self._most_bytes = sys.maxsize
        self._segments: list[torch.Tensor] = []
        self._place = self._streams = 0

    def receive(self) -> Iterator[WeightChunk]:
        self._place = 0
        return super().receive()

    def close(self) -> None:
        for place in range(len(self._segments)):
            self._forget(place)
        self._segments = []
        super().close()

    def _begin(self) -> None:
        self._place, self._streams = 0, self._streams + 1
        self._wait(lambda: self._get(0, WANTED) >= self._streams, "the sampler to ask for weights")

    def _pieces(self, chunk: WeightChunk) -> Iterator[WeightChunk]:
        yield chunk

    def _fill(self, chunk: WeightChunk) -> None:
        self._body(ChunkLayout.of(chunk).num_bytes)
        super()._fill(chunk)
        self._place += 1

    def _read(self, number: int) -> tuple[ChunkLayout, torch.Tensor]:
        layout, _ = super()._read(number)
        body = self._body(layout.num_bytes)
        self._place += 1
        return layout, body

    def _slot(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        body = self._segments[self._place] if self._place < len(self._segments) else self._bytes[:0]
        return super()._slot(number)[0], body

    def _body(self, num_bytes: int) -> torch.Tensor:
        """The segment of the bucket whose turn it is: made by the owner and opened by the other end, while it has the
        same size only once."""
        if self._place == len(self._segments):
            self._segments.append(self._segment(num_bytes))
        elif self._segments[self._place].numel() != num_bytes:
            self._forget(self._place)
            self._segments[self._place] = self._segment(num_bytes)
        return self._segments[self._place]

    def _forget(self, place: int) -> None:
        """Remove a segment's name; its memory goes with the last tensor in it, which may be a sampler's."""
        if self._is_owner:
            Path(self._name(place, self._segments[place].numel())).unlink(missing_ok=True)

    def _segment(self, num_bytes: int) -> torch.Tensor:
        path = self._name(self._place, num_bytes)
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if self._is_owner else 0)
        handle = os.open(path, flags, 0o600)
        try:
            if self._is_owner:
                reserve(handle, path, num_bytes)
            if os.fstat(handle).st_size < num_bytes:
                raise RolloutError("a segment of weights is too short", key=path)
            memory = mmap.mmap(handle, max(1, num_bytes))
            if self._unlinks:
                Path(path).unlink(missing_ok=True)
        finally:
            os.close(handle)
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]

    def _name(self, place: int, num_bytes: int) -> str:
        return f"{self.path}-{place}-{num_bytes}"
