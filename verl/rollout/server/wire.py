"""HTTP/1.1 on asyncio streams, as much of it as JSON requests between programs need, for both sides.

The standard library has no asynchronous client, and the base installation of this library has none either. Left out on
purpose: redirects, compression, cookies, proxies, bodies that are streamed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.json_text import read_json

MAX_HEAD = 64 << 10
MAX_BODY = 512 << 20


class WireError(Exception):
    """The other side does not speak HTTP, or stopped in the middle."""


@dataclass
class Message:
    """A request or an answer.

    Args:
        start: the first line, in its parts.
        headers: by lower-case name.
    """

    start: tuple[str, ...]
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def status(self) -> int:
        return int(self.start[1])

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            WireError: it is none.
        """
        try:
            return read_json(self.body)
        except ValueError as error:
            raise WireError(f"not JSON: {self.body[:80]!r}") from error


def render(start: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A message as it goes over the wire."""
    lines = [start, *(f"{name}: {value}" for name, value in headers.items()), f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def read_message(reader: asyncio.StreamReader, *, is_answer: bool) -> Message | None:
    """The next message; None if the connection ended before it began.

    Raises:
        WireError: what comes is not a whole message.
    """
    message = await read_head(reader, is_answer=is_answer)
    if message is not None:
        await read_body(reader, message, is_answer=is_answer)
    return message


async def read_head(reader: asyncio.StreamReader, *, is_answer: bool) -> Message | None:
    """The next message without its body; None if the connection ended before it began.

    Raises:
        WireError: what comes is not the head of a message.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise WireError(f"the connection ended inside the head: {error.partial[:80]!r}") from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise WireError("the head is too long") from error
    message = _parse_head(head)
    if is_answer and (not message.start[0].startswith("HTTP/") or len(message.start) < 2):
        raise WireError(f"not an HTTP answer: {head[:80]!r}")
    if not is_answer and len(message.start) < 2:
        raise WireError(f"not an HTTP request: {head[:80]!r}")
    return message


async def read_body(
    reader: asyncio.StreamReader, message: Message, *, is_answer: bool, max_body: int = MAX_BODY
) -> None:
    """Read the rest of a message whose head was read.

    Raises:
        WireError: it is not whole, or longer than ``max_body`` bytes.
    """
    try:
        message.body = await _read_body(reader, message, is_answer, max_body)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise WireError("the connection ended inside the body") from error


def _parse_head(head: bytes) -> Message:
    lines = head.decode("latin-1").split("\r\n")
    message = Message(tuple(lines[0].split(" ", 2)))
    if message.start[0].startswith("HTTP/") and not (len(message.start) > 1 and message.start[1].isdigit()):
        raise WireError(f"no status in {lines[0]!r}")
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if line and not colon:
            raise WireError(f"not a header: {line[:80]!r}")
        if line:
            message.headers[name.strip().lower()] = value.strip()
    return message


async def _read_body(reader: asyncio.StreamReader, message: Message, is_answer: bool, max_body: int) -> bytes:
    if message.headers.get("transfer-encoding", "").lower() == "chunked":
        return await _read_chunks(reader, max_body)
    length = message.headers.get("content-length")
    if length is not None:
        if not length.isdigit() or int(length) > max_body:
            raise WireError(f"content-length {length!r}")
        return await reader.readexactly(int(length))
    if not is_answer or message.status in (204, 304):
        return b""
    message.headers["connection"] = "close"  # the body ends where the connection does
    body = await reader.read(max_body + 1)
    if len(body) > max_body:
        raise WireError("the body is too long")
    return body


async def _read_chunks(reader: asyncio.StreamReader, max_body: int) -> bytes:
    parts, total = [], 0
    while True:
        line = (await reader.readuntil(b"\r\n")).split(b";")[0].strip()
        try:
            size = int(line, 16)
        except ValueError as error:
            raise WireError(f"not a chunk size: {line[:20]!r}") from error
        total += size
        if size < 0 or total > max_body:
            raise WireError("the body is too long")
        parts.append((await reader.readexactly(size + 2))[:-2])
        if size == 0:
            return b"".join(parts)
