"""Messages between the caller and a sandbox: a length, then JSON. Nothing on this wire can be run by reading it."""

from __future__ import annotations

import json
import struct
from typing import Any

from verl.json_text import MESSAGE_DEPTH, read_json

HEADER = struct.Struct("!I")
MAX_REQUEST = 256 << 20
"""Bytes of the largest message that either side takes."""


def pack(message: Any) -> bytes:
    """Raises ValueError where the message holds something that JSON does not know or is too large."""
    data = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode()
    if len(data) > MAX_REQUEST:
        raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_REQUEST}")
    return HEADER.pack(len(data)) + data


class Frames:
    """Collects the pieces that a socket delivers into messages."""

    def __init__(self, max_size: int = MAX_REQUEST) -> None:
        self._data, self._max_size = bytearray(), max_size

    def feed(self, piece: bytes) -> list[Any]:
        """The messages that this piece completes. Raises ValueError for one that is too large or not JSON."""
        self._data += piece
        messages = []
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            if length > self._max_size:
                raise ValueError(f"a message of {length} bytes is larger than {self._max_size}")
            end = HEADER.size + length
            if len(self._data) < end:
                break
            messages.append(read_json(self._data[HEADER.size : end], depth=MESSAGE_DEPTH))
            del self._data[:end]
        return messages
