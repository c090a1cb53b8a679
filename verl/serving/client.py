"""Questions over HTTP that end: h11 on asyncio streams, with a pool of connections for each event loop.

A pool of its own, because a request through httpx costs 3 to 19 times the processor time (`docs/concepts/design.md`).
Left out on purpose: redirects, compression, cookies, proxies, bodies that are streamed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import h11

from verl.errors import ConfigError
from verl.json_text import read_json
from verl.serving import secret

MAX_HEAD = 64 << 10
MAX_BODY = 512 << 20
PIECE = 1 << 16
UNIX = "unix:"
OPENING = 32
"""Connections that a client may be opening at once: a server of this library ends some of those that have not shown the
key while there are too many of them, and a burst of requests must not look like strangers."""


class WireError(Exception):
    """The other side does not speak HTTP, stopped in the middle, or is not who it should be."""


@dataclass
class Reply:
    """What a server answered.

    Args:
        headers: by lower-case name.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            WireError: it is none.
        """
        try:
            return read_json(self.body)
        except ValueError as error:
            raise WireError(f"not JSON: {self.body[:80]!r}") from error


@dataclass
class _Connection:
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT, MAX_HEAD))
    is_fresh: bool = True


class _Pool:
    """The connections of one event loop."""

    def __init__(self, size: int):
        # Requests of one event loop, each for its whole length.
        self.slots = asyncio.Semaphore(size)
        # Connections of these requests that are not open yet; inside `slots`.
        self.opening = asyncio.Semaphore(OPENING)
        self.idle: list[_Connection] = []


class Client:
    """JSON over HTTP to one server.

    Args:
        url: ``http://host:port``, ``https://...`` with a path if everything is below one, or ``unix:/path``.
        max_connections: open at once; further requests wait.
        headers: sent with every request.
        key: of a server of this library: it is not sent to one that does not prove that it knows it, and no answer of
            such a one is believed.
    """

    def __init__(
        self, url: str, max_connections: int = 1000, headers: Mapping[str, str] | None = None, key: str | None = None
    ):
        self.url, self.key = url, key
        self._unix = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        parts = urlsplit("http://localhost" if self._unix else url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "not the address of a server", key="actor_rollout_ref.rollout.server.url", got=url,
                allowed="http://host:port, unix:/path",
            )  # fmt: skip
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"host": parts.netloc, "content-type": "application/json", **(headers or {})}
        self._size = max_connections
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()

    async def ask(self, method: str, path: str, payload: Any = None, timeout: float = 60.0) -> Reply:
        """One attempt.

        Raises:
            WireError, OSError, asyncio.TimeoutError: no answer, none in time, or one of another program.
        """
        return await asyncio.wait_for(self._ask(method, path, payload), timeout)

    async def proves(self, key: str, timeout: float = 60.0) -> bool:
        """Whether the server knows a key, which is not sent to it; False if it has no answer to that.

        Raises:
            WireError: it claims to, and does not. As `ask` besides.
        """

        async def ask() -> bool:
            line = await self._open()
            try:
                return await self._has_proved(line, key)
            finally:
                line.writer.close()

        return await asyncio.wait_for(ask(), timeout)

    async def _ask(self, method: str, path: str, payload: Any) -> Reply:
        body = b"" if payload is None else json.dumps(payload).encode()
        if self.key is None:
            return await self._exchange(method, self._base + path, self._headers, body)
        nonce = secret.new_nonce()
        headers = {**self._headers, "authorization": f"Bearer {self.key}", secret.NONCE: nonce}
        reply = await self._exchange(method, self._base + path, headers, body)
        proof = secret.of_answer(self.key, nonce, reply.status, reply.body)
        if not secret.same(reply.headers.get(secret.PROOF, ""), proof):
            raise WireError("the answer is not from a server that knows the key")
        return reply

    async def _exchange(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        question = _request(method, target, headers, body)
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = _Pool(self._size)
        async with pool.slots:
            while True:
                line = pool.idle.pop() if pool.idle else await self._opened(pool)
                reply = await self._over(line, question, body, pool)
                if reply is not None:
                    return reply
                if line.is_fresh:
                    raise WireError("the server closed the connection without an answer")

    async def _over(self, line: _Connection, question: h11.Request, body: bytes, pool: _Pool) -> Reply | None:
        """The answer; None if a connection that had been idle turns out to be closed."""
        is_kept = False
        try:
            reply = await _round(line, question, body)
            is_kept = reply is not None and line.state.our_state is h11.IDLE
            return reply
        except (ConnectionResetError, BrokenPipeError):
            if line.is_fresh:
                raise
            return None
        except h11.ProtocolError as error:
            raise WireError(f"not an HTTP answer: {error}") from error
        finally:
            # A request that was given up must not leave its answer to the next one: the server sees the end of the
            # connection and stops sampling.
            if is_kept:
                line.is_fresh = False
                pool.idle.append(line)
            else:
                line.writer.close()

    async def _opened(self, pool: _Pool) -> _Connection:
        """One that became idle while others were being opened, or a new one; its question is written at once."""
        async with pool.opening:
            return pool.idle.pop() if pool.idle else await self._connect()

    async def _connect(self) -> _Connection:
        """A new connection; its server has proved that it knows the key, if there is one.

        Each has to: another program may have come to the address since the last one was opened.
        """
        line = await self._open()
        try:
            if self.key is not None and not await self._has_proved(line, self.key):
                raise WireError("the server there does not prove that it knows the key")
        except BaseException:
            line.writer.close()
            raise
        return line

    async def _has_proved(self, line: _Connection, key: str) -> bool:
        nonce = secret.new_nonce()
        plain = {name: value for name, value in self._headers.items() if name != "authorization"}
        try:
            reply = await _round(line, _request("GET", secret.PATH, {**plain, secret.NONCE: nonce}, b""), b"")
        except h11.ProtocolError as error:
            raise WireError(f"not an HTTP answer: {error}") from error
        if reply is None:
            raise WireError("the server closed the connection without an answer")
        if reply.status != 200:
            return False
        claim = reply.json()
        if not isinstance(claim, dict) or not secret.same(str(claim.get("proof")), secret.of_server(key, nonce)):
            raise WireError("the server there does not know the key: another program has its address")
        return True

    async def _open(self) -> _Connection:
        if self._unix is None:
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._tls))
        line = _Connection(*await asyncio.open_unix_connection(self._unix))
        _check_peer(line.writer)
        return line


def _request(method: str, target: str, headers: Mapping[str, str], body: bytes) -> h11.Request:
    return h11.Request(method=method, target=target, headers=[*headers.items(), ("content-length", str(len(body)))])


async def _round(line: _Connection, question: h11.Request, body: bytes) -> Reply | None:
    """One request and its answer; None if the connection ended before it began."""
    events = (question, h11.Data(data=body), h11.EndOfMessage()) if body else (question, h11.EndOfMessage())
    line.writer.write(b"".join(line.state.send(event) or b"" for event in events))
    await line.writer.drain()
    reply = await _read(line)
    if line.state.our_state is line.state.their_state is h11.DONE:
        line.state.start_next_cycle()
    return reply


async def _read(line: _Connection) -> Reply | None:
    """The next answer; None if the connection ended before it began."""
    head: h11.Response | None = None
    parts: list[bytes] = []
    total, is_silent = 0, True
    while True:
        event = line.state.next_event()
        if event is h11.NEED_DATA:
            data = await line.reader.read(PIECE)
            if not data and is_silent:
                return None
            is_silent = False
            line.state.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
            total += len(event.data)
            if total > MAX_BODY:
                raise WireError("the body is too long")
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            return Reply(head.status_code, headers, b"".join(parts))


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """A unix socket tells whose process listens there."""
    size = struct.calcsize("3i")
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    owner = struct.unpack("3i", raw)[1]
    if owner not in (os.geteuid(), 0):
        writer.close()
        raise WireError(f"the process that listens there belongs to user {owner}")
