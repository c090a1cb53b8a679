"""The stream in which weights travel: buckets of bounded size that all carry the version they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from verl.errors import RolloutError


@dataclass(frozen=True)
class WeightChunk:
    """Some tensors of one version, under their Hugging Face names.

    Example:
        >>> WeightChunk(version=7, tensors=[("model.norm.weight", torch.ones(64))], last=True)

    Args:
        version: the same in every chunk of a stream.
        last: whether the stream ends here; a stream without a last chunk was interrupted.
        is_unit: whether the tensors only mean something together, so that a transport may not cut the chunk.
        is_live: whether the tensors are the trainer's parameters themselves, which change with its next update.
    """

    version: int
    tensors: list[tuple[str, torch.Tensor]]
    last: bool
    is_unit: bool = False
    is_live: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for _, t in self.tensors)


def chunk_weights(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, version: int, is_live: bool = False
) -> Iterator[WeightChunk]:
    """Cut a stream of named tensors into chunks of at most ``bucket_bytes``; a larger tensor travels alone.

    The source is read one tensor ahead, never as a whole, so a source that gathers shards needs memory for one bucket
    and one tensor.

    Raises:
        RolloutError: no tensors at all, or a bucket size that is not positive.
    """
    if bucket_bytes < 1:
        raise RolloutError(
            "a bucket needs room", key="update_weights_bucket_megabytes", got=bucket_bytes, allowed="1 or more"
        )
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > bucket_bytes:
            yield WeightChunk(version, bucket, last=False, is_live=is_live)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if not bucket:
        raise RolloutError("the trainer exported no weights", key=f"version {version}")
    yield WeightChunk(version, bucket, last=True, is_live=is_live)


def pieces(chunk: WeightChunk, piece_bytes: int) -> Iterator[WeightChunk]:
    """A chunk, if it may be, cut between its tensors into smaller ones: ``piece_bytes``, or one larger tensor.

    What has just been written by one process is still in the processor's cache when another one reads it, if there is
    not too much of it.
    """
    if chunk.is_unit or chunk.num_bytes <= piece_bytes:
        yield chunk
        return
    for part in chunk_weights(chunk.tensors, piece_bytes, chunk.version):
        yield WeightChunk(chunk.version, part.tensors, chunk.last and part.last)


@contextmanager
def taking(chunks: Iterable[WeightChunk]) -> Iterator[Iterator[WeightChunk]]:
    """The chunks one by one; their producer is closed at once if the consumer stops early."""
    stream = iter(chunks)
    try:
        yield stream
    finally:
        close = getattr(stream, "close", None)  # generators have it, and branches of `deliver`
        if close is not None:
            close()
