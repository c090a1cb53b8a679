"""The server: Starlette on uvicorn's protocol; every request needs a token, and none can hurt another.

Before a body is read, its length and the token are looked at. Browsers are turned away (an Origin header, a Host that
is not this machine), and work whose client has gone is cancelled. The server lives in the event loop of its caller.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn import Config
from uvicorn.server import ServerState

from verl.errors import VerlError
from verl.serving import listener, secret
from verl.serving.answers import ApiError, Handle, HttpRequest, HttpResponse, as_json
from verl.serving.connection import CONNECTION, Connection, OpenConnections, ServerLimits

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
BACKLOG = 2048
PIECE = 1 << 16
JSON = "application/json"
Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass
class Server:
    """Answers on one socket.

    Args:
        routes: (method, path) -> handler; paths are those of Starlette (``/v1/models/{name:path}``).
        authorize: token -> its owner, None for an unknown one; has to take the same time for any wrong token.
        names: what a Host header may say besides the names of loopback.
        key: of a server that proves to its clients that it knows it; see `secret`.
        bodies: path -> bytes of a body, where a route takes more than ``limits.body``.
    """

    routes: dict[tuple[str, str], Handle]
    authorize: Callable[[str], Any]
    limits: ServerLimits = field(default_factory=ServerLimits)
    names: tuple[str, ...] = ()
    key: str | None = None
    bodies: Mapping[str, int] = field(default_factory=dict)
    address: str = ""
    _server: asyncio.Server | None = None
    _state: ServerState = field(default_factory=ServerState)

    async def start(self, on: socket.socket | None = None) -> None:
        """Listen.

        Args:
            on: a bound socket; None takes a free port of loopback.
        """
        bound = on if on is not None else listener.loopback()
        self.address = listener.address_of(bound)
        config = Config(
            self._door(),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=self.limits.idle_seconds,  # type: ignore[arg-type]  # seconds, whole or not
            h11_max_incomplete_event_size=self.limits.head,
        )
        config.load()
        self._state = ServerState()
        limits = self._limits_on(bound)
        make = partial(Connection, config, self._state, {}, open_connections=OpenConnections(limits))
        self._server = await asyncio.get_running_loop().create_server(make, sock=bound, backlog=BACKLOG)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _limits_on(self, bound: socket.socket) -> ServerLimits:
        """Every client of a unix socket is this user, so any number may connect before the first key is read."""
        is_unix = bound.family == socket.AF_UNIX
        return replace(self.limits, strangers=self.limits.connections) if is_unix else self.limits

    def _door(self) -> Any:
        routes = [Route(path, _Endpoint(self, handle), methods=[verb]) for (verb, path), handle in self.routes.items()]
        inside = Starlette(routes=routes, exception_handlers={HTTPException: self._no_such_route})

        async def door(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            try:
                if self.key is not None and request.url.path == secret.PATH:
                    await self._prove(request)(scope, receive, send)
                    return
                request.state.owner = self._admit(request)
                scope[CONNECTION].let_in()
                self._check_length(request)
            except ApiError as error:
                await self.refusal(error, request)(scope, receive, send)
            else:
                await inside(scope, receive, send)

        return door

    def _admit(self, request: Request) -> Any:
        """Whose request it is.

        Raises:
            ApiError: not for a program on this machine, or no valid token.
        """
        names = (*LOCAL_NAMES, *self.names)
        host = request.headers.get("host", "")
        if host not in names and not any(host == f"{name}:{self.address.rpartition(':')[2]}" for name in names):
            raise ApiError(403, "The Host header must name this machine.", "forbidden")
        if "origin" in request.headers:
            raise ApiError(403, "Requests of web pages are not answered.", "forbidden")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        owner = self.authorize(token.strip() if scheme.lower() == "bearer" else "")
        if owner is None:
            raise ApiError(401, "Incorrect API key provided: use the one that the server gave.", "invalid_api_key")
        return owner

    def _check_length(self, request: Request) -> None:
        length = request.headers.get("content-length", "0")  # digits alone: h11 takes nothing else
        most = self.most_bytes(request)
        if len(length) > 19 or int(length) > most:
            allowed = f"at most {most} are allowed"
            raise ApiError(413, f"The body has {length[:20]} bytes; {allowed}.", "too_large")

    def most_bytes(self, request: Request) -> int:
        """That a body may have."""
        return self.bodies.get(request.url.path, self.limits.body)

    def proof(self, request: Request, status: int, body: bytes) -> dict[str, str]:
        nonce = request.headers.get(secret.NONCE, "")
        if self.key is None or not 0 < len(nonce) <= secret.LONGEST:
            return {}
        return {secret.PROOF: secret.of_answer(self.key, nonce, status, body)}

    def _prove(self, request: Request) -> Response:
        nonce = request.headers.get(secret.NONCE, "")
        if not 0 < len(nonce) <= secret.LONGEST:
            return self.refusal(ApiError(400, f"The header {secret.NONCE} holds a number that is used once."), request)
        assert self.key is not None
        body = as_json({"proof": secret.of_server(self.key, nonce)})
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        return Response(body, 200, {"connection": "close"} if has_body else None, JSON)  # the key comes on the same one

    def refusal(self, error: ApiError, request: Request) -> Response:
        """An answer after which the connection ends."""
        body = as_json(error.body())
        return Response(body, error.status, {"connection": "close", **self.proof(request, error.status, body)}, JSON)

    async def _no_such_route(self, request: Request, error: Exception) -> Response:
        path = request.url.path[:200]
        if isinstance(error, HTTPException) and error.status_code == 405:
            return self.refusal(
                ApiError(405, f"{request.method} is not allowed for {path}.", "method_not_allowed"), request
            )
        return self.refusal(ApiError(404, f"There is no {path!r} here.", "not_found"), request)


@dataclass
class _Endpoint:
    """What stands behind a route: reads the body, runs the handler while its client is there, and answers."""

    server: Server
    handle: Handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await asyncio.wait_for(self._read(request), self.server.limits.read_seconds)
        except TimeoutError:
            await self._refuse(ApiError(408, "The body did not arrive in time."), request, send)
        except ApiError as error:
            await self._refuse(error, request, send)
        except ClientDisconnect:
            pass
        else:
            await self._answer(HttpRequest(request.state.owner, request.path_params, body), request, send)

    async def _refuse(self, error: ApiError, request: Request, send: Send) -> None:
        await self.server.refusal(error, request)(request.scope, request.receive, send)

    async def _read(self, request: Request) -> bytes:
        parts, total, most = [], 0, self.server.most_bytes(request)
        async for part in request.stream():
            total += len(part)
            if total > most:
                raise ApiError(413, f"The body is too long: at most {most} bytes are allowed.", "too_large")
            parts.append(part)
        return b"".join(parts)

    async def _answer(self, call: HttpRequest, request: Request, send: Send) -> None:
        work = asyncio.ensure_future(_guarded(self.handle, call))
        gone = asyncio.ensure_future(request.receive())  # nothing more comes than the end of the connection
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                answered = work.result()
                answered.sent()
                if not await self._write(answered, request, gone, send):
                    answered.unsent()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _write(self, answered: HttpResponse, request: Request, gone: asyncio.Future[Any], send: Send) -> bool:
        """Whether the client was there until its end."""
        if answered.events is not None:
            parts, headers = answered.events, {"content-type": "text/event-stream", "cache-control": "no-cache"}
        else:
            body = as_json(answered.payload)
            proof = self.server.proof(request, answered.status, body)
            parts, headers = _parts(body), {"content-type": JSON, "content-length": str(len(body)), **proof}
        head = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": answered.status, "headers": head})
        async for part in parts:
            if gone.done():
                return False
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if gone.done():
            return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def _parts(body: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), PIECE):
        yield body[begin : begin + PIECE]


async def _guarded(handle: Handle, request: HttpRequest) -> HttpResponse:
    try:
        return await handle(request)
    except ApiError as error:
        return HttpResponse(error.body(), status=error.status)
    except VerlError as error:
        return HttpResponse(ApiError(500, str(error)).body(), status=500)
    except Exception as error:  # boundary: what one request meets must not end the others
        return HttpResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), status=500)
