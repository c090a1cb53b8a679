"""The transport of colocated runs: trainer and samplers live in one process, and chunks are passed by reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from verl.weight_sync.chunks import WeightChunk, chunk_weights


class WeightReceiver(Protocol):
    """What takes weights: every sampler does."""

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None: ...


class SameProcessTransport:
    """Streams weights into receivers of this process.

    Args:
        receivers: updated one after the other, each with a stream of its own.
        bucket_bytes: size of a chunk; bounds what a source that gathers shards must hold at once.

    Example:
        >>> await SameProcessTransport([sampler]).send(engine.export_weights, version=3)
    """

    def __init__(self, receivers: Sequence[WeightReceiver], bucket_bytes: int = 2048 << 20):
        self.receivers, self.bucket_bytes = list(receivers), bucket_bytes

    async def send(self, export: Callable[[], Iterable[tuple[str, torch.Tensor]]], version: int) -> None:
        """Export once per receiver, so that no receiver makes another one's buckets wait in memory."""
        for receiver in self.receivers:
            await receiver.update_weights(chunk_weights(export(), self.bucket_bytes, version), version)
