"""The door: HTTP/1.1 on loopback, where nobody gets past without a token and no request can hurt another.

A connection is served by one task. The token is checked before the body is read, bodies and heads have a limit in size
and time, browsers are turned away (an Origin header, a Host that is not this machine), and work whose client has gone
is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from verl.agent_loop.server.errors import ApiError
from verl.errors import VerlError
from verl.rollout.server.wire import MAX_HEAD, Message, WireError, read_body, read_head, render

MAX_BODY = 16 << 20
MAX_CONNECTIONS = 4096
READ_SECONDS = 30.0
IDLE_SECONDS = 60.0
LINGER_SECONDS = 2.0
GONE_POLL = 0.1
EVENT_STREAM = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "transfer-encoding": "chunked",
}
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass
class Answered:
    """What a handler gives back: JSON, or a stream of events.

    Args:
        sent: called before it goes out, so that a next request finds it done.
        unsent: called if the client has gone meanwhile.
    """

    payload: Any = None
    events: AsyncIterator[bytes] | None = None
    status: int = 200
    sent: Callable[[], None] = lambda: None
    unsent: Callable[[], None] = lambda: None


Handle = Callable[[Any, Message], Awaitable[Answered]]
"""(whom the token belongs to, the request with its body) -> the answer."""


@dataclass
class Limits:
    """How much one client may take."""

    body: int = MAX_BODY
    connections: int = MAX_CONNECTIONS
    read_seconds: float = READ_SECONDS


@dataclass
class Server:
    """Listens on 127.0.0.1 on a port of its own.

    Args:
        routes: (method, path) -> handler; a path ending in ``/*`` takes anything below it.
        authorize: token -> whom it belongs to, None for nobody; has to take the same time for any wrong token.
    """

    routes: dict[tuple[str, str], Handle]
    authorize: Callable[[str], Any]
    limits: Limits = field(default_factory=Limits)
    port: int = 0
    _server: asyncio.Server | None = None
    _connections: set[asyncio.Task[Any]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=MAX_HEAD)
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(ConnectionError, WireError, asyncio.TimeoutError):
                if len(self._connections) > self.limits.connections:
                    await _refuse(reader, writer, ApiError(503, "Too many connections.", "overloaded"))
                    return
                while await self._exchange(reader, writer):
                    pass
        except asyncio.CancelledError:
            pass  # the rollout is over; a task of a server has nobody to tell
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow on this connection."""
        try:
            message = await asyncio.wait_for(read_head(reader, is_answer=False), IDLE_SECONDS)
        except WireError as error:
            await _refuse(reader, writer, ApiError(400, f"Not an HTTP request: {error}"))
            return False
        if message is None:
            return False
        try:
            owner, handle = self._admit(message)
            await self._read(reader, writer, message)
        except ApiError as error:
            await _refuse(reader, writer, error)
            return False
        work = asyncio.ensure_future(_answer(handle, owner, message))
        answered = await _unless_gone(work, reader)
        if answered is None:
            return False
        answered.sent()
        try:
            await _write(writer, answered, message.keeps_alive)
        except ConnectionError:
            answered.unsent()
            raise
        return message.keeps_alive

    def _admit(self, message: Message) -> tuple[Any, Handle]:
        """Whose request it is and who answers it.

        Raises:
            ApiError: not for a program on this machine, no valid token, or nothing is there.
        """
        if len(message.start) != 3 or not message.start[2].startswith("HTTP/1."):
            raise ApiError(400, "Not an HTTP/1.1 request.")
        host = message.headers.get("host", "")
        if host not in (*LOCAL_NAMES, *(f"{name}:{self.port}" for name in LOCAL_NAMES)):
            raise ApiError(403, "The Host header must name this machine.", "forbidden")
        if "origin" in message.headers:
            raise ApiError(403, "Requests of web pages are not answered.", "forbidden")
        scheme, _, token = message.headers.get("authorization", "").partition(" ")
        owner = self.authorize(token.strip() if scheme.lower() == "bearer" else "")
        if owner is None:
            raise ApiError(401, "Incorrect API key provided: use the one that the rollout gave.", "invalid_api_key")
        return owner, self._handler(message.start[0], message.start[1].partition("?")[0])

    def _handler(self, method: str, path: str) -> Handle:
        known = {route: handle for (verb, route), handle in self.routes.items() if verb == method}
        for route, handle in known.items():
            if path == route or (route.endswith("/*") and path.startswith(route[:-1])):
                return handle
        if any(path == route for _, route in self.routes):
            raise ApiError(405, f"{method} is not allowed for {path[:200]}.", "method_not_allowed")
        raise ApiError(404, f"There is no {path[:200]!r} here.", "not_found")

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: Message) -> None:
        length = message.headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > self.limits.body:
            raise ApiError(
                413, f"The body has {length[:20]} bytes; at most {self.limits.body} are allowed.", "too_large"
            )
        if message.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            work = read_body(reader, message, is_answer=False, max_body=self.limits.body)
            await asyncio.wait_for(work, self.limits.read_seconds)
        except WireError as error:
            too_long = "too long" in str(error)
            raise ApiError(413 if too_long else 400, f"The body cannot be read: {error}.") from error
        except asyncio.TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.") from error


async def _answer(handle: Handle, owner: Any, message: Message) -> Answered:
    try:
        return await handle(owner, message)
    except ApiError as error:
        return Answered(error.body(), status=error.status)
    except WireError as error:
        return Answered(ApiError(400, f"The body is {error}.").body(), status=400)
    except VerlError as error:
        return Answered(ApiError(500, str(error)).body(), status=500)
    except Exception as error:  # boundary: what one request meets must not end the others
        return Answered(ApiError(500, f"{type(error).__name__}: {error}").body(), status=500)


async def _unless_gone(task: asyncio.Future[Answered], reader: asyncio.StreamReader) -> Answered | None:
    """The answer, or None if whoever asked has gone; then the work is cancelled."""
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=GONE_POLL)
            if reader.at_eof() and not task.done():
                return None
        return task.result()
    finally:
        task.cancel()


async def _write(writer: asyncio.StreamWriter, answered: Answered, keeps_alive: bool) -> None:
    headers = {} if keeps_alive else {"connection": "close"}
    if answered.events is None:
        body = json.dumps(_finite(answered.payload)).encode()
        writer.write(render(f"HTTP/1.1 {answered.status} {_reason(answered.status)}",
                            {"content-type": "application/json", **headers}, body))  # fmt: skip
        await writer.drain()
    else:
        head = {
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            "transfer-encoding": "chunked",
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode("latin-1"))
        async for event in answered.events:
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: ApiError) -> None:
    """Answer, and take what the client still sends for a moment: it would not read the answer before."""
    await _write(writer, Answered(error.body(), status=error.status), keeps_alive=False)
    writer.write_eof()

    async def drain() -> None:
        while await reader.read(1 << 16):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drain(), LINGER_SECONDS)


def _finite(value: Any) -> Any:
    """JSON has no infinities: a log-prob of minus infinity goes as OpenAI's -9999."""
    if isinstance(value, float) and not math.isfinite(value):
        return -9999.0
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _reason(status: int) -> str:
    return {200: "OK", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 413: "Content Too Large"}.get(
        status, "OK" if status < 300 else "Error"
    )
