"""Weights as differences: after a step at a small learning rate in bfloat16, one element in seventy has changed.

The sender keeps what it sent last and sends positions and new bits of what differs now; the receiver keeps the same and
ends with the same bits, NaN payloads and -0.0 included, because everything is compared and added as integers. Per chunk
of weights there are three streams of bytes, each compressed: gaps between changed elements (one byte, larger ones
escaped), differences of the integers (zigzag, one byte, larger ones escaped; one unit in the last place is 1 or 2), and
the escapes. A chunk of which too much has changed travels whole.

A receiver cannot mistake one version for another: a difference names the version it starts from, and a checksum of the
whole result is compared. After an error the receiver asks for a whole copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from verl.errors import RolloutError
from verl.weight_sync.checksum import INTEGERS, as_integers, checksum
from verl.weight_sync.chunks import WeightChunk, taking

WHOLE_ABOVE = 0.4
"""Part of changed elements above which a tensor travels whole."""
ESCAPE = 255
LEVEL = 6
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SUFFIXES = ("gaps", "steps", "long_gaps", "long_steps")
WHOLE, META = "whole", "meta"


class DeltaEncoder:
    """Turns a stream of weights into a stream of differences to the stream before.

    Args:
        dtype: what floating-point weights are cast to first, which must be what the receiver's have: differences of
            float32 master weights would be everything. None leaves them as they are.

    Example:
        >>> encoder = DeltaEncoder(torch.bfloat16)
        >>> transport.send(encoder.encode(chunk_weights(engine.export_weights(), 1 << 28, 3)))
    """

    def __init__(self, dtype: torch.dtype | None = None):
        self.dtype = dtype
        self._sent: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        self.num_changed = self.num_elements = self.num_bytes = self.num_bytes_whole = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than whole weights the last stream had."""
        return self.num_bytes_whole / max(1, self.num_bytes)

    def reset(self) -> None:
        """The next stream is a whole one: a receiver is new, or lost its state."""
        self._version = None

    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Chunks of uint8 and integer tensors that only `DeltaDecoder` understands."""
        base, self._version = self._version, None
        if base is None:
            self._sent = {}
        self.num_changed = self.num_elements = self.num_bytes = self.num_bytes_whole = 0
        last = None
        for chunk in chunks:
            tensors: list[tuple[str, torch.Tensor]] = []
            for name, tensor in chunk.tensors:
                tensors += self._encode(name, tensor)
            header = torch.tensor([chunk.version, -1 if base is None else base], dtype=torch.int64)
            encoded = WeightChunk(chunk.version, [(META, header), *tensors], chunk.last, is_unit=True)
            self.num_bytes += encoded.num_bytes
            yield encoded
            last = chunk
        if last is not None and last.last:
            self._version = last.version

    @torch.no_grad()
    def _encode(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        new = as_integers(tensor)
        self.num_elements += new.numel()
        self.num_bytes_whole += tensor.nbytes
        total = _as_signed(checksum(new))
        old = self._sent.get(name)
        if old is None or old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
            self._sent[name] = new.clone()
            self.num_changed += new.numel()
            return [_sum(name, total), (f"{name}|{WHOLE}", tensor.detach())]
        # numpy looks for what differs twice as fast as torch, where it can.
        ours, theirs = (new.numpy(), old.numpy()) if new.device.type == "cpu" else (new, old)
        where = _places(ours != theirs)
        self.num_changed += len(where)
        if len(where) > WHOLE_ABOVE * new.numel():
            old.copy_(new)
            return [_sum(name, total), (f"{name}|{WHOLE}", tensor.detach())]
        before, after = theirs[where], ours[where]
        theirs[where] = after
        streams = _compress(*(_on_host(part) for part in (where, before, after)))
        return [
            _sum(name, total),
            *((f"{name}|{suffix}", data) for suffix, data in zip(SUFFIXES, streams) if len(data)),
        ]


class DeltaDecoder:
    """Turns differences back into whole weights, over a copy of the weights that it keeps.

    Example:
        >>> await sampler.update_weights(decoder.decode(transport.receive()), version=3)
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self.version: int | None = None

    def decode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Chunks of whole weights. They are views of the decoder's own copy: read only, valid until the next stream.

        Raises:
            RolloutError: an update in between was lost, or the result is not what the sender has. The decoder then
                knows nothing any more, and the next stream must be a whole one (`DeltaEncoder.reset`).
        """
        base, self.version = self.version, None
        version, ended = -1, False
        with taking(chunks) as stream:
            for chunk in stream:
                parts = dict(chunk.tensors)
                header = parts.pop(META, None)
                if header is None or header.numel() != 2:
                    raise RolloutError("these weights are not differences", fix="Encode them with DeltaEncoder.")
                version, needed_base = (int(x) for x in header)
                if needed_base >= 0 and needed_base != base:
                    raise RolloutError(
                        f"an update of the weights was lost: differences to version {needed_base} arrived",
                        got="no weights" if base is None else f"version {base}",
                        fix="Send the whole weights once (DeltaEncoder.reset).",
                    )
                names = dict.fromkeys(key.rpartition("|")[0] for key in parts)
                tensors = [(name, self._decode(name, parts)) for name in names]
                ended = chunk.last
                yield WeightChunk(version, tensors, chunk.last)
        if ended:
            self.version = version

    @torch.no_grad()
    def _decode(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        full = parts.get(f"{name}|{WHOLE}")
        if full is not None:
            local = self._kept.get(name)
            if local is None or local.shape != full.shape or local.dtype != full.dtype or local.device != full.device:
                local = self._kept[name] = torch.empty_like(full, memory_format=torch.contiguous_format)
            local.copy_(full)
        else:
            local = self._kept.get(name)
            if local is None:
                raise RolloutError("differences of a weight that never arrived whole", key=name)
            streams = [parts.get(f"{name}|{suffix}") for suffix in SUFFIXES]
            if streams[0] is not None:
                bits = local.view(-1).view(INTEGERS[local.element_size()])
                where, steps = _expand(streams, local.element_size(), bits.numel(), name)
                index = torch.from_numpy(where).to(bits.device)
                bits[index] = bits[index] + torch.from_numpy(steps).to(bits.device)
        expected = parts.get(f"{name}|sum")
        if expected is None or int(expected) != _as_signed(checksum(local)):
            raise RolloutError(
                "the weights after an update are not the trainer's: the checksum differs",
                key=name,
                fix="Send the whole weights once (DeltaEncoder.reset).",
            )
        return local


def _sum(name: str, total: int) -> tuple[str, torch.Tensor]:
    return f"{name}|sum", torch.tensor(total, dtype=torch.int64)


def _places(mask: Any) -> Any:
    """Indices of what is true in an array or a tensor."""
    return np.flatnonzero(mask) if isinstance(mask, np.ndarray) else mask.nonzero().view(-1)


def _on_host(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def _compress(where: np.ndarray, before: np.ndarray, after: np.ndarray) -> list[torch.Tensor]:
    """The four streams of `SUFFIXES`."""
    unsigned = UNSIGNED[after.itemsize]
    gaps = np.diff(where, prepend=-1) - 1
    steps = _zigzag(after.view(unsigned) - before.view(unsigned))
    streams = [
        np.minimum(gaps, ESCAPE).astype(np.uint8),
        np.minimum(steps, ESCAPE).astype(np.uint8),
        gaps[gaps >= ESCAPE].astype("<u8"),
        steps[steps >= ESCAPE],
    ]
    return [
        torch.frombuffer(_deflate(stream.tobytes()), dtype=torch.uint8)
        if len(stream)
        else torch.empty(0, dtype=torch.uint8)
        for stream in streams
    ]


def _deflate(data: bytes) -> bytearray:
    """Zlib's format, but a search for runs only: the streams repeat nothing else, and their search takes ten times as
    long for more bytes."""
    coder = zlib.compressobj(LEVEL, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return bytearray(coder.compress(data) + coder.flush())


def _expand(streams: list[torch.Tensor | None], width: int, numel: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions, and what is to be added to the integers there.

    Raises:
        RolloutError: the streams do not belong together or point outside the tensor.
    """
    kinds: list[np.dtype] = [np.dtype(np.uint8), np.dtype(np.uint8), np.dtype("<u8"), np.dtype(UNSIGNED[width])]
    try:
        gaps8, steps8, long_gaps, long_steps = (
            np.frombuffer(b"" if stream is None else _inflate(stream, 8 * numel), dtype=kind)
            for stream, kind in zip(streams, kinds)
        )
        gaps, steps = gaps8.astype(np.int64), steps8.astype(UNSIGNED[width])
        gaps[gaps8 == ESCAPE], steps[steps8 == ESCAPE] = long_gaps.astype(np.int64), long_steps
        if len(gaps) != len(steps):
            raise ValueError("there are more positions than values, or fewer")
        where = np.cumsum(gaps + 1) - 1
        if len(where) and (gaps.min() < 0 or where.max() >= numel):
            raise ValueError("a position outside the weight")
    except (zlib.error, ValueError) as error:
        raise RolloutError(f"the differences of a weight cannot be read: {error}", key=name) from error
    return where, _unzigzag(steps).view(f"i{width}" if width > 1 else np.uint8)


def _inflate(stream: torch.Tensor, most: int) -> bytes:
    """Decompress; no more than ``most`` bytes, so that a few bytes cannot claim all memory."""
    inflated = zlib.decompressobj().decompress(stream.cpu().numpy().tobytes(), most + 1)
    if len(inflated) > most:
        raise ValueError("more differences than elements")
    return inflated


def _zigzag(difference: np.ndarray) -> np.ndarray:
    """Small positive and negative numbers (in two's complement) to small unsigned ones: 0, -1, 1, -2 -> 0, 1, 2, 3."""
    sign = difference >> np.array(8 * difference.itemsize - 1, dtype=difference.dtype)
    one = np.array(1, dtype=difference.dtype)
    return (difference << one) ^ (np.zeros_like(difference) - sign)


def _unzigzag(number: np.ndarray) -> np.ndarray:
    one = np.array(1, dtype=number.dtype)
    return (number >> one) ^ (np.zeros_like(number) - (number & one))


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
