"""Differences over another transport: `DeltaEncoder` at the trainer's end of it, `DeltaDecoder` at the sampler's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from verl.registry import TRANSPORTS
from verl.weight_sync.chunks import WeightChunk
from verl.weight_sync.delta import DeltaDecoder, DeltaEncoder
from verl.weight_sync.transport import Transport


class DeltaTransport(Transport):
    """One end of a connection that carries differences.

    Args:
        over: the end of the transport below.
        dtype: see `DeltaEncoder`.
        name: of the transport below.

    Example:
        >>> ours = DeltaTransport.begin(512 << 20, over="disk", folder="/nfs/run/weights")
        >>> theirs = DeltaTransport.reach(ours.address)  # in the sampler's process
    """

    not_options: ClassVar[tuple[str, ...]] = ("name", "dtype")

    def __init__(self, over: Transport, dtype: torch.dtype | None = None, name: str = ""):
        super().__init__(over.timeout)
        self.over, self.name = over, name
        self.encoder, self.decoder = DeltaEncoder(dtype), DeltaDecoder()

    @classmethod
    def begin(
        cls,
        bucket_bytes: int,
        device: str = "cpu",
        over: str = "shared_memory",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> DeltaTransport:
        # A bucket of differences may be larger than the weights, by headers and checksums.
        below = TRANSPORTS.get(over).begin(bucket_bytes + (1 << 20), device, **options)
        return cls(below, dtype, over)

    @classmethod
    def reach(cls, address: Mapping[str, Any], device: str = "cpu") -> DeltaTransport:
        return cls(TRANSPORTS.get(str(address["over"])).reach(address["address"], device))

    @property
    def address(self) -> dict[str, Any]:
        return {"over": self.name, "address": self.over.address}

    def expect(self, version: int) -> None:
        self.over.expect(version)

    def abandon(self, reason: str) -> None:
        self.over.abandon(reason)

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        return self.over.send(self.encoder.encode(chunks))

    def receive(self) -> Iterator[WeightChunk]:
        return self.decoder.decode(self.over.receive())

    def close(self) -> None:
        self.over.close()
