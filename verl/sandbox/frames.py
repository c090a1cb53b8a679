"""Messages to and from sandboxes and reward processes: a length, then JSON. Reading them runs nothing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

from verl.json_text import MESSAGE_DEPTH, read_json

HEADER = struct.Struct("!I")
MAX_REQUEST = 256 << 20
"""Bytes of the largest message that either side takes."""


def pack(message: object) -> bytes:
    """Raises ValueError where the message holds something that JSON does not know or is too large."""
    data = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode()
    if len(data) > MAX_REQUEST:
        raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_REQUEST}")
    return HEADER.pack(len(data)) + data


class Frames:
    """Collects the pieces that a pipe or a socket delivers into messages."""

    def __init__(self, max_size: int = MAX_REQUEST) -> None:
        self._data, self._max_size = bytearray(), max_size

    @property
    def is_empty(self) -> bool:
        """Whether no part of a message is here."""
        return not self._data

    def add(self, piece: bytes) -> None:
        """Take a piece."""
        self._data += piece

    def messages(self) -> Iterator[Any]:
        """Take out the messages that are complete. Raises ValueError for one that is too large or not JSON."""
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            if length > self._max_size:
                raise ValueError(f"a message of {length} bytes is larger than {self._max_size}")
            end = HEADER.size + length
            if len(self._data) < end:
                break
            text = str(self._data[HEADER.size : end], "ascii")
            del self._data[:end]
            yield read_json(text, depth=MESSAGE_DEPTH)

    def feed(self, piece: bytes) -> list[Any]:
        """The messages that this piece completes. Raises ValueError as `messages`."""
        self.add(piece)
        return list(self.messages())


def read(pipe: int) -> Iterator[Any]:
    """The messages that come through a file descriptor, until it ends. Raises ValueError as `Frames.messages`."""
    collector = Frames()
    while piece := os.read(pipe, 1 << 16):
        yield from collector.feed(piece)
