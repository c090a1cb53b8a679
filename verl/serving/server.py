"""The server: Starlette on uvicorn; every request needs a token or a signature, and none can hurt another.

Before a body is read, its length and the token are looked at. Browsers are turned away (an Origin header, a Host that
is not this machine) unless the server declares a page (`BrowserAccess`), and work whose client has gone is cancelled.
Connections that show no key in time are ended. The server lives in the event loop of its caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from verl.errors import VerlError
from verl.serving import listener, secret
from verl.serving.answers import ApiError, Handle, HttpRequest, HttpResponse, as_json
from verl.serving.browsers import BrowserAccess

LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
BACKLOG = 2048
PIECE = 1 << 16
JSON = "application/json"
Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class ServerLimits:
    """How much clients may take.

    Args:
        head: bytes of a request's head.
        body: bytes of its body.
        connections: open at once, at most 50 % of the descriptors that the process may have; a request over one more
            is answered with 503.
        strangers: of them, connections that have shown no key; a burst of a client's is one, too, for a moment.
        head_seconds: in which a connection has to show a key.
        read_seconds: for a body.
        idle_seconds: between two requests.
        write_seconds: for which a client may leave an answer unread.
        linger_seconds: how long the rest of a refused body is taken, without which its sender could lose the answer.
    """

    head: int = 64 << 10
    body: int = 16 << 20
    connections: int = 4096
    strangers: int = 2048
    head_seconds: float = 10.0
    read_seconds: float = 30.0
    idle_seconds: float = 60.0
    write_seconds: float = 60.0
    linger_seconds: float = 2.0

    @property
    def most(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return self.connections if soft == resource.RLIM_INFINITY else max(1, min(self.connections, soft // 2))


@dataclass
class Server:
    """Answers on one socket.

    Args:
        routes: (method, path) -> handler; paths are those of Starlette (``/v1/models/{name:path}``).
        authorize: token -> its owner, None for an unknown one; has to take the same time for any wrong token.
        names: what a Host header may say besides the names of loopback.
        key: of a server that proves to its clients that it knows it; see `secret`.
        bodies: path -> bytes of a body, where a route takes more than ``limits.body``.
        key_in_path: the first part of each path is the token, for clients that know an address and nothing else.
        browsers: how a browser on this machine is let in; None: no browser is.
    """

    routes: dict[tuple[str, str], Handle]
    authorize: Callable[[str], Any]
    limits: ServerLimits = field(default_factory=ServerLimits)
    names: tuple[str, ...] = ()
    key: str | None = None
    bodies: Mapping[str, int] = field(default_factory=dict)
    key_in_path: bool = False
    browsers: BrowserAccess | None = None
    address: str = ""
    _uvicorn: uvicorn.Server | None = None
    _watch: asyncio.Task[None] | None = None
    _run: str = ""
    _admitted: set[Any] = field(default_factory=set)

    async def start(self, on: socket.socket | None = None) -> None:
        """Listen.

        Args:
            on: a bound socket; None takes a free port of loopback.
        """
        bound = on if on is not None else listener.loopback()
        self.address, self._run, self._admitted = listener.address_of(bound), secret.new_nonce(), set()
        config = uvicorn.Config(
            self._door(),
            http="h11",  # the one with a limit for heads
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what strangers send is not logged
            access_log=False,
            proxy_headers=False,
            backlog=BACKLOG,
            limit_concurrency=self.limits.most + 1,
            timeout_keep_alive=self.limits.idle_seconds,  # type: ignore[arg-type]  # seconds, a float
            h11_max_incomplete_event_size=self.limits.head,
        )
        config.load()
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)
        await self._uvicorn.startup([bound])  # not `serve`, which takes the signals of the process
        if bound.family != socket.AF_UNIX:  # every client of a unix socket is this user
            self._watch = asyncio.ensure_future(self._end_strangers())

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def connections(self) -> list[Any]:
        """Those that are open."""
        return list(self._uvicorn.server_state.connections) if self._uvicorn is not None else []

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._uvicorn is None:
            return
        for one in self._uvicorn.servers:
            one.close()
        for connection in self.connections:
            connection.transport.abort()
        tasks = [*self._uvicorn.server_state.tasks, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._uvicorn = self._watch = None

    async def _end_strangers(self) -> None:
        """End connections that show no key in time, and the oldest of them while there are too many: a program
        without a key cannot keep others out. One that has come since the last look stays: its request may be here."""
        since: dict[Any, float] = {}
        while True:
            await asyncio.sleep(min(1.0, self.limits.head_seconds / 4))
            now = asyncio.get_running_loop().time()
            here = self.connections
            self._admitted.intersection_update([connection.client for connection in here])
            last, strangers = since, [connection for connection in here if connection.client not in self._admitted]
            since = {connection: last.get(connection, now) for connection in strangers}
            seen = sorted((connection for connection in strangers if connection in last), key=last.__getitem__)
            excess = len(strangers) - min(self.limits.strangers, self.limits.most // 2)
            for rank, connection in enumerate(seen):
                if rank < excess or now - last[connection] >= self.limits.head_seconds:
                    connection.transport.abort()

    def drop(self, client: Any) -> None:
        """End a client's connection without a word. One of a unix socket has no address, and ends with its client."""
        for connection in self.connections:
            if client is not None and connection.client == client:
                connection.transport.abort()

    def _door(self) -> Any:
        routes = [Route(path, _Endpoint(self, handle), methods=[verb]) for (verb, path), handle in self.routes.items()]
        inside = Starlette(routes=routes, exception_handlers={HTTPException: self._no_such_route})

        async def door(scope: Scope, receive: Receive, send: Send) -> None:
            token = None
            if self.key_in_path:
                token, _, rest = scope["path"].removeprefix("/").partition("/")
                scope = {**scope, "path": f"/{rest}"}  # messages do not show the token
            request = Request(scope, receive)
            if self.browsers is not None:
                send = self.browsers.with_headers(send)
            try:
                if self.browsers is not None and self.browsers.is_login(request):
                    self._check_source(request)
                    await self.browsers.login(request, self.authorize, self.port)(scope, receive, send)
                    return
                if self.key is not None and request.url.path == secret.PATH:
                    await self._prove(request)(scope, receive, send)
                    return
                request.state.owner = self._admit(request, token)
                self._admitted.add(scope["client"])
                self._check_length(request)
            except ApiError as error:
                await self.refusal(error, request)(scope, receive, send)
            else:
                await inside(scope, receive, send)

        return door

    def _admit(self, request: Request, token: str | None) -> Any:
        """Whose request it is; without a token in the path its headers name one.

        Raises:
            ApiError: not for a program on this machine, or no valid token.
        """
        self._check_source(request)
        if self.key is not None and secret.PROOF in request.headers:
            return self._signer(request, self.key)
        if token is None:
            scheme, _, named = request.headers.get("authorization", "").partition(" ")
            token = named.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not token and self.browsers is not None:
            return self.browsers.owner_of(request, self.port)
        owner = self.authorize(token)
        if owner is None:
            raise ApiError(401, "Incorrect API key provided: use the one that the server gave.", "invalid_api_key")
        return owner

    def _check_source(self, request: Request) -> None:
        """Refuse what a page of another site sends, also one that has made its name lead to this machine.

        Raises:
            ApiError: it is.
        """
        names = (*LOCAL_NAMES, *self.names)
        host, port = request.headers.get("host", ""), self.address.rpartition(":")[2]
        if host not in names and not any(host == f"{name}:{port}" for name in names):
            hint = f"a tunnel forwards the same port number (ssh -L {port}:127.0.0.1:{port})"
            raise ApiError(403, f"The Host header must name this machine and its port: {hint}.", "forbidden")
        if self.browsers is not None:
            self.browsers.check_source(request)
        elif "origin" in request.headers:
            raise ApiError(403, "Requests of web pages are not answered.", "forbidden")

    def _signer(self, request: Request, key: str) -> Any:
        nonce, body_digest, signed = (request.headers.get(n, "") for n in (secret.NONCE, secret.DIGEST, secret.PROOF))
        query = request.scope["query_string"]
        target = (request.scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        host = request.headers["host"]
        expected = secret.of_request(key, self._run, nonce, request.method, host, target, body_digest)
        owner = self.authorize(key) if secret.same(signed, expected) else None
        if owner is None:
            raise ApiError(401, "The signature is not one by this server's key for its present run.", "invalid_api_key")
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
        body = as_json({"run": self._run, "proof": secret.of_server(self.key, nonce, self._run)})
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        return Response(body, 200, {"connection": "close"} if has_body else None, JSON)

    def refusal(self, error: ApiError, request: Request) -> Response:
        body = as_json(error.body())
        headers = {"connection": "close", **self.proof(request, error.status, body)}
        return _Refusal(body, error.status, headers, JSON, linger_seconds=self.limits.linger_seconds)

    async def _no_such_route(self, request: Request, error: Exception) -> Response:
        path = request.url.path[:200]
        if isinstance(error, HTTPException) and error.status_code == 405:
            return self.refusal(
                ApiError(405, f"{request.method} is not allowed for {path}.", "method_not_allowed"), request
            )
        return self.refusal(ApiError(404, f"There is no {path!r} here.", "not_found"), request)


class _Refusal(Response):
    """An answer after which the connection ends. The rest of the request is taken for a moment before: a sender whose
    bytes nobody reads would lose the answer."""

    def __init__(self, *args: Any, linger_seconds: float):
        super().__init__(*args)
        self._seconds = linger_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
            query = request.query_params.multi_items()
            call = HttpRequest(request.state.owner, request.path_params, body, query)
            await self._answer(call, request, send)

    async def _refuse(self, error: ApiError, request: Request, send: Send) -> None:
        await self.server.refusal(error, request)(request.scope, request.receive, send)

    async def _read(self, request: Request) -> bytes:
        parts, total, most, hashed = [], 0, self.server.most_bytes(request), hashlib.sha256()
        signed = request.headers.get(secret.DIGEST)
        async for part in request.stream():
            total += len(part)
            if total > most:
                raise ApiError(413, f"The body is too long: at most {most} bytes are allowed.", "too_large")
            parts.append(part)
            if signed is not None:
                hashed.update(part)
        if signed is not None and not secret.same(signed, hashed.hexdigest()):
            raise ApiError(400, "The body is not the one that was signed.")
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
            body = as_json(answered.payload) if answered.content is None else answered.content
            proof = self.server.proof(request, answered.status, body)
            sizes = {"content-type": answered.media, "content-length": str(len(body))}
            parts, headers = _parts(body), {**sizes, **proof, **answered.headers}
        head = [(name.encode(), value.encode()) for name, value in headers.items()]

        async def write(**message: object) -> None:
            async with asyncio.timeout(self.server.limits.write_seconds):
                await send(message)

        try:
            await write(type="http.response.start", status=answered.status, headers=head)
            async for part in parts:
                if gone.done():
                    return False
                await write(type="http.response.body", body=part, more_body=True)
            if gone.done():
                return False
            await write(type="http.response.body", body=b"", more_body=False)
        except TimeoutError:  # the client leaves its answer unread
            self.server.drop(request.scope["client"])
            return False
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
