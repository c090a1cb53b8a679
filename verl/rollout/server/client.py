"""Requests to one server that end: within a time, after a few attempts, and not at all while it is known to be down."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from verl.errors import ConfigError, RolloutError
from verl.rollout.lost import EngineBusyError, EngineLostError
from verl.rollout.server.wire import MAX_HEAD, Message, WireError, read_message, render

T = TypeVar("T")
BUSY = (408, 425, 429, 502, 503, 504)
LONGEST_DELAY = 30.0
SHOWN = 300


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_fresh: bool = True


class _Pool:
    """The connections of one event loop."""

    def __init__(self, size: int):
        self.seats = asyncio.Semaphore(size)
        self.idle: list[_Connection] = []


class HttpClient:
    """JSON over HTTP to one server.

    Args:
        url: ``http://host:port`` or ``https://...``, with a path if everything lies below one.
        max_connections: open at once; further requests wait.
        headers: sent with every request.
    """

    def __init__(self, url: str, max_connections: int = 1000, headers: Mapping[str, str] | None = None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "not the address of a server", key="actor_rollout_ref.rollout.server.url", got=url,
                allowed="http://host:port",
            )  # fmt: skip
        self.url = url
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"host": parts.netloc, "content-type": "application/json", **(headers or {})}
        self._size = max_connections
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()

    async def ask(self, method: str, path: str, payload: Any = None, timeout: float = 60.0) -> Message:
        """One attempt.

        Raises:
            EngineLostError: no answer, or none in time.
        """
        body = b"" if payload is None else json.dumps(payload).encode()
        raw = render(f"{method} {self._base}{path} HTTP/1.1", self._headers, body)
        try:
            return await asyncio.wait_for(self._exchange(raw), timeout)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise EngineLostError(f"{self.url}{path} did not answer within {timeout:g} s") from error
        except (OSError, WireError) as error:
            raise EngineLostError(f"{self.url}{path} is not answering: {error or type(error).__name__}") from error

    async def _exchange(self, raw: bytes) -> Message:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = _Pool(self._size)
        async with pool.seats:
            while True:
                connection = pool.idle.pop() if pool.idle else await self._connect()
                answer = await self._over(connection, raw, pool)
                if answer is not None:
                    return answer
                if connection.is_fresh:
                    raise WireError("the server closed the connection without an answer")

    async def _over(self, connection: _Connection, raw: bytes, pool: _Pool) -> Message | None:
        """The answer; None if a connection that had been idle turns out to be closed."""
        is_kept = False
        try:
            connection.writer.write(raw)
            await connection.writer.drain()
            answer = await read_message(connection.reader, is_answer=True)
            is_kept = answer is not None and answer.keeps_alive
            return answer
        except (ConnectionResetError, BrokenPipeError):
            if connection.is_fresh:
                raise
            return None
        finally:
            # A request that was given up must not leave its answer to the next one: the server sees the end of the
            # connection and stops sampling.
            if is_kept:
                connection.is_fresh = False
                pool.idle.append(connection)
            else:
                connection.writer.close()

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_HEAD, ssl=self._tls)
        return _Connection(reader, writer)


class Breaker:
    """Keeps requests away from a server that failed several times in a row.

    After ``threshold`` failures it is open for ``cooldown`` seconds; then one request may try. Its success closes it,
    its failure opens it again.
    """

    def __init__(self, threshold: int = 5, cooldown: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self.threshold, self.cooldown, self._clock = threshold, cooldown, clock
        self._failures = 0
        self._closed_until: float | None = None

    @property
    def is_open(self) -> bool:
        return self._failures >= self.threshold

    def seconds_to_wait(self) -> float:
        """0 if a request may go; it must then report `succeeded` or `failed`."""
        if not self.is_open:
            return 0.0
        now = self._clock()
        if self._closed_until is None or now >= self._closed_until:
            self._closed_until = now + self.cooldown  # this one tries, the others wait for what becomes of it
            return 0.0
        return self._closed_until - now

    def succeeded(self) -> None:
        self._failures, self._closed_until = 0, None

    def failed(self) -> None:
        self._failures += 1
        if self.is_open:
            self._closed_until = self._clock() + self.cooldown


class Retrying:
    """Attempts until one succeeds, at most ``max_attempts``, with growing pauses of random length between them.

    Whoever makes one attempt only has others to ask: an open breaker is then an error at once.

    Args:
        delay: seconds of the first pause on average; each is twice as long as the one before.
    """

    def __init__(self, max_attempts: int = 3, delay: float = 2.0, breaker: Breaker | None = None):
        self.max_attempts, self.delay = max_attempts, delay
        self.breaker = breaker or Breaker()
        self.num_retries = 0
        self._random = random.Random()

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds.

        Raises:
            EngineLostError: the last attempt's, with how many there were.
        """
        last: EngineLostError | None = None
        for number in range(self.max_attempts):
            if number:
                self.num_retries += 1
                await asyncio.sleep(self._pause(number, last))
            wait = self.breaker.seconds_to_wait()
            if wait > 0:
                last = last or EngineLostError("the server failed several times in a row and is left alone for a while")
                if self.max_attempts == 1:
                    raise last
                await asyncio.sleep(wait * self._random.uniform(1.0, 1.2))
                if self.breaker.seconds_to_wait() > 0:
                    continue
            try:
                result = await attempt()
            except EngineLostError as error:
                self.breaker.failed()
                last = error
            except RolloutError:
                self.breaker.succeeded()  # it refused the request, so it is alive
                raise
            else:
                self.breaker.succeeded()
                return result
        assert last is not None
        times = "once" if self.max_attempts == 1 else f"{self.max_attempts} times"
        raise EngineLostError(f"{last.message} (tried {times})", key=last.key, fix=last.fix) from last

    def _pause(self, number: int, last: EngineLostError | None) -> float:
        asked = last.got if isinstance(last, EngineBusyError) and isinstance(last.got, float) else 0.0
        grown = self.delay * 2 ** (number - 1)
        return min(LONGEST_DELAY, max(asked, grown * self._random.uniform(0.5, 1.5)))


def accepted(answer: Message, where: str) -> Any:
    """The JSON of an answer with a good status.

    Raises:
        EngineBusyError, EngineLostError: the server cannot answer now.
        RolloutError: the server refuses the request; asking again would not help.
    """
    if 200 <= answer.status < 300:
        try:
            return answer.json() if answer.body else {}
        except WireError as error:
            raise EngineLostError(f"{where} answered with something else than JSON: {error}") from error
    said = reason(answer)
    if answer.status in BUSY:
        after = answer.headers.get("retry-after", "")
        raise EngineBusyError(
            f"{where} answered {answer.status}: {said}", got=float(after) if after.isdigit() else None
        )
    if answer.status >= 500:
        raise EngineLostError(f"{where} answered {answer.status}: {said}")
    raise RolloutError(f"{where} refuses the request ({answer.status}): {said}", got=None)


def reason(answer: Message) -> str:
    """What an error says, in the forms in which servers say it."""
    try:
        found = answer.json()
    except WireError:
        return answer.body[:SHOWN].decode("utf-8", "replace").strip() or "no reason given"
    for name in ("error", "message", "detail"):
        while isinstance(found, dict) and name in found:
            found = found[name]
    return str(found)[:SHOWN]
