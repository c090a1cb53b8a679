"""Questions over HTTP that end: aiohttp's client, and the proof that both sides know a key which neither sends.

Left out on purpose: redirects, compression, cookies, proxies, bodies that are streamed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from aiohttp import (
    BaseConnector,
    ClientError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    UnixConnector,
)

from verl.errors import ConfigError
from verl.json_text import read_json
from verl.serving import secret

MAX_BODY, LONG_BODY = 512 << 20, 256 << 10
"""Bytes: the longest body of an answer, and of a request that is hashed on the event loop (some 0.2 ms)."""
UNIX = "unix:"
KEEP_SECONDS = 4.0
"""For which an idle connection is kept: servers end theirs after 5 s or later, and a request must not meet that end."""
MOST_RUNS = 4
"""Runs of a server for which one request is signed, while the server is started again and again."""
LONGEST_DELAY = 30.0
"""Seconds between two attempts."""


_OPEN: dict[ClientSession, asyncio.AbstractEventLoop] = {}
"""Sessions of all threads. The garbage collector may find a client in a cycle, and ends what is in it in any order: a
session that was part of that would break its connections before its generator closes it."""


class WireError(Exception):
    """The other side does not speak HTTP, stopped in the middle, or is not who it should be."""


class ServerBusyError(WireError):
    """A 503 that nobody signed: the server is over its limit of connections, or another program has its address."""


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

    @property
    def retry_after(self) -> float:
        """Seconds for which the server wants no further request; a date is not read."""
        seconds = self.headers.get("retry-after", "")
        return float(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 9 else 0.0


class _Pool:
    """The connections of one event loop, and the run of the server that it talks to."""

    def __init__(self, held: AsyncGenerator[ClientSession]):
        self.held = held
        # The signed requests of one event loop, while the first of them gets the proof of the server.
        self.lock = asyncio.Lock()
        self.session: ClientSession | None = None
        self.run: str | None = None


class Client:
    """JSON over HTTP to one server.

    Args:
        url: ``http://host:port``, ``https://...`` with a path if everything is below one, or ``unix:/path``.
        max_connections: open at once; further requests wait.
        headers: sent with every request.
        key: of a server of this library: requests are signed with it, after the server has proved that it knows it,
            and only signed answers are believed.
        setting: where the address comes from, for the error about one that is none.
    """

    def __init__(
        self,
        url: str,
        max_connections: int = 1000,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        setting: str = "actor_rollout_ref.rollout.server.url",
    ):
        self.url, self.key = url, key
        self._unix = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        parts = urlsplit("http://localhost" if self._unix else url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "not the address of a server", key=setting, got=url, allowed="http://host:port, unix:/path"
            )  # fmt: skip
        self._origin, self._base, self._host = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/"), parts.netloc
        self._headers = {
            "host": parts.netloc, "content-type": "application/json", "accept-encoding": "identity", **(headers or {})
        }  # fmt: skip
        self._size = max_connections
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()

    async def ask(self, method: str, path: str, payload: Any = None, timeout: float = 60.0) -> Reply:
        """One attempt.

        Raises:
            WireError, OSError, TimeoutError: no answer, none in time, or one of another program.
        """
        body = b"" if payload is None else json.dumps(payload).encode()
        async with asyncio.timeout(timeout):
            if self.key is None:
                return await self._exchange(method, self._base + path, self._headers, body)
            return await self._signed(method, self._base + path, body, self.key)

    async def proves(self, key: str, timeout: float = 60.0) -> bool:
        """Whether the server knows a key, which is not sent to it; False if it has no answer to that.

        Raises:
            WireError: it claims to, and does not, or it is busy. As `ask` besides.
        """
        async with asyncio.timeout(timeout):
            return await self._run_of_server(key) is not None

    async def _signed(self, method: str, target: str, body: bytes, key: str) -> Reply:
        pool = self._pool()
        body_digest = await asyncio.to_thread(secret.digest, body) if len(body) > LONG_BODY else secret.digest(body)
        for _ in range(MOST_RUNS):
            async with pool.lock:
                if pool.run is None:
                    pool.run = await self._run_of_server(key)
                run = pool.run
            if run is None:
                raise WireError("the server there does not prove that it knows the key")
            nonce = secret.new_nonce()
            signed = secret.of_request(key, run, nonce, method, self._host, target, body_digest)
            headers = {**self._headers, secret.NONCE: nonce, secret.DIGEST: body_digest, secret.PROOF: signed}
            try:
                reply = await self._exchange(method, target, headers, body)
                proof = secret.of_answer(key, nonce, reply.status, reply.body)
                if not secret.same(reply.headers.get(secret.PROOF, ""), proof):
                    _check_busy(reply)
                    raise WireError("the answer is not from a server that knows the key")
            except (OSError, WireError):
                pool.run = None  # another program may come to the address
                raise
            if reply.status != 401:
                return reply
            async with pool.lock:
                if pool.run == run:  # else another request has got the proof of a server that was started again
                    pool.run = await self._run_of_server(key)
                if pool.run == run:
                    return reply
        raise WireError(f"the server there was started again during each of {MOST_RUNS} attempts")

    async def _run_of_server(self, key: str) -> str | None:
        """The name of the server's run, with the proof that it knows the key; None if it has no answer to that."""
        nonce = secret.new_nonce()
        plain = {name: value for name, value in self._headers.items() if name != "authorization"}
        reply = await self._exchange("GET", secret.PATH, {**plain, secret.NONCE: nonce}, b"")
        _check_busy(reply)
        if reply.status != 200:
            return None
        claim = reply.json()
        run = str(claim.get("run")) if isinstance(claim, dict) else ""
        if not isinstance(claim, dict) or not secret.same(str(claim.get("proof")), secret.of_server(key, nonce, run)):
            raise WireError("the server there does not know the key: another program has its address")
        return run

    async def _exchange(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Reply:
        if self._unix is not None:
            _check_owner(self._unix)
        session = await self._session()
        try:
            async with session.request(
                method, self._origin + target, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                parts, total = [], 0
                async for part in response.content.iter_any():
                    parts.append(part)
                    total += len(part)
                    if total > MAX_BODY:
                        raise WireError("the body is too long")
                names = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, names, b"".join(parts))
        except ClientError as error:
            if isinstance(error, OSError):
                raise
            raise WireError(f"not an HTTP answer: {error}") from error

    def _pool(self) -> _Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = _Pool(self._held())
        return pool

    async def _session(self) -> ClientSession:
        pool = self._pool()
        if pool.session is None:
            pool.session = await anext(pool.held)
        return pool.session

    async def _held(self) -> AsyncGenerator[ClientSession]:
        """A session until the event loop ends, which closes what is still suspended in it."""
        for session in [session for session, loop in list(_OPEN.items()) if loop.is_closed()]:
            _OPEN.pop(session, None)  # nothing closes it any more, and aiohttp says so
        connector: BaseConnector = (
            UnixConnector(self._unix, limit=self._size, keepalive_timeout=KEEP_SECONDS)
            if self._unix is not None
            else TCPConnector(limit=self._size, keepalive_timeout=KEEP_SECONDS)
        )
        async with ClientSession(
            connector=connector, cookie_jar=DummyCookieJar(), timeout=ClientTimeout(total=None), auto_decompress=False
        ) as session:
            _OPEN[session] = asyncio.get_running_loop()
            try:
                while True:
                    yield session
            finally:
                _OPEN.pop(session, None)


def _check_busy(reply: Reply) -> None:
    """Raise for an unsigned 503, of which nothing but the status is used."""
    if reply.status == 503:
        raise ServerBusyError("the server has as many connections as it takes (503)")


def _check_owner(path: str) -> None:
    """A unix socket belongs to the user whose process listens there."""
    owner = Path(path).stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise WireError(f"the process that listens there belongs to user {owner}")
