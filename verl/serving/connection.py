"""One connection: uvicorn's protocol over h11, with the deadlines that it does not have, and a bound on their number.

A client that sends nothing, or a byte now and then, is dropped. While there are too many connections, those that have
shown no key go first, the oldest before the others, then those between two requests: a program without a key cannot
keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl.serving.answers import ApiError, as_json

CONNECTION = "verl.connection"
"""Key of a request's scope."""
_SILENT = logging.getLogger("verl.serving.http")
_SILENT.setLevel(logging.CRITICAL)  # what strangers send is no news


@dataclass(frozen=True)
class ServerLimits:
    """How much clients may take.

    Args:
        head: bytes of a request's head.
        body: bytes of its body.
        connections: open at once; at most half of the descriptors that the process may have.
        strangers: of them, connections that have shown no key.
        head_seconds: from a connection's beginning, or a head's first byte, to its end.
        read_seconds: for a body.
        idle_seconds: between two requests.
        write_seconds: for which a client may leave an answer unread.
        linger_seconds: how long the rest of a refused body is taken, so that its sender gets to read the answer.
    """

    head: int = 64 << 10
    body: int = 16 << 20
    connections: int = 4096
    strangers: int = 256
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
class OpenConnections:
    """The connections of a server, those that may go first in the order in which they would."""

    limits: ServerLimits
    strangers: dict[Connection, None] = field(default_factory=dict)
    idle: dict[Connection, None] = field(default_factory=dict)

    def make_room(self, count: int) -> bool:
        """Whether one more may stay, of ``count`` with it."""
        if len(self.strangers) > self.limits.strangers:
            next(iter(self.strangers)).drop()
        if count <= self.limits.most:
            return True
        for spare in (self.strangers, self.idle):
            if len(spare) > (spare is self.strangers):  # the newest stranger is the one that asks
                next(iter(spare)).drop()
                return True
        return False

    def forget(self, connection: Connection) -> None:
        self.strangers.pop(connection, None)
        self.idle.pop(connection, None)


class _Transport:
    """What the protocol writes to. Closed in the middle of a request, it takes the rest for a moment: a sender whose
    bytes nobody reads would lose the answer."""

    def __init__(self, inner: Any, linger: Callable[[], bool]):
        self._inner, self._linger, self._is_over = inner, linger, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        return self._is_over or self._inner.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self._is_over = True
        if not self._linger():
            self._inner.close()


class Connection(H11Protocol):
    """See the module; `uvicorn.Config` makes no difference to it but for the size of a head."""

    def __init__(self, *args: Any, open_connections: OpenConnections, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.logger, self.access_log = _SILENT, False
        self._answer, self.app = self.app, self._named
        self._open = open_connections
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head, self._is_over = True, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self._linger))  # type: ignore[arg-type]
        self._open.strangers[self] = None
        self._wait(self._open.limits.head_seconds, self.drop)
        if not self._open.make_room(len(self.connections)):
            most = self._open.limits.most
            self._refuse(
                ApiError(503, f"Too many connections: {most} are allowed (ulimit -n bounds them).", "overloaded")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.forget(self)
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._look()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(ApiError(400, "Not an HTTP request."))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(self._open.limits.write_seconds, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait(None)

    def let_in(self) -> None:
        """It has shown a key."""
        self._open.strangers.pop(self, None)

    def drop(self) -> None:
        """End it without a word."""
        self._open.forget(self)
        self.transport.abort()

    async def _named(self, scope: Any, receive: Any, send: Any) -> None:
        scope[CONNECTION] = self
        await self._answer(scope, receive, send)

    def _look(self) -> None:
        """Which deadline holds now."""
        if self.conn.their_state is not h11.IDLE:
            self._open.idle.pop(self, None)
            self._is_in_head = False
            self._wait(None)  # of the body and the answer others take care
        elif self.conn.trailing_data[0]:
            if not self._is_in_head:
                self._is_in_head = True
                self._wait(self._open.limits.head_seconds, self.drop)
        elif self in self._open.strangers:
            if self._timer is None:  # it received the proof; a request with the key has to follow
                self._wait(self._open.limits.head_seconds, self.drop)
        elif not self._is_in_head:
            self._open.idle[self] = None

    def _refuse(self, error: ApiError) -> None:
        """Answer a client without a request that could be answered."""
        body = as_json(error.body())
        head = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (
                h11.Response(status_code=error.status, headers=head),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _linger(self) -> bool:
        """Take for a moment what its client still sends; whether there may be something."""
        self._is_over = True
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED) or not self.transport.can_write_eof():
            return False
        self.flow.resume_reading()
        self.transport.write_eof()
        self._wait(self._open.limits.linger_seconds, self.drop)
        return True

    def _wait(self, seconds: float | None, then: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, then)
