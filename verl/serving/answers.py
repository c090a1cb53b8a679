"""What a handler gets and gives, and the error body of a refused request."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.json_text import read_json


class ApiError(Exception):
    """A request that is refused; its body has the form of OpenAI's.

    Args:
        status: of HTTP.
        message: what is wrong, for the person who wrote the client.
        code: OpenAI's word for it (``invalid_api_key``, ``model_not_found``, ...).
        param: the field of the request that is at fault.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def kind(self) -> str:
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass
class HttpRequest:
    """A request that was let in.

    Args:
        owner: whom its token belongs to.
        parameters: parts of the path that the route names.
        query: (name, value) of what follows the path's question mark, in its order.
    """

    owner: Any
    parameters: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    query: Sequence[tuple[str, str]] = ()

    def json(self) -> Any:
        """The body as JSON; nothing at all is an empty object.

        Raises:
            ApiError: it is none.
        """
        try:
            return read_json(self.body or b"{}")
        except ValueError as error:
            raise ApiError(400, f"The body is not JSON: {self.body[:80]!r}.") from error


@dataclass
class HttpResponse:
    """What a handler gives back: JSON, a stream of events, or bytes of another kind.

    Args:
        content: the body as it is sent, in place of ``payload``.
        media: type of ``content``.
        headers: further ones.
        sent: called before it goes out, so that a next request finds it done.
        unsent: called if the client has gone meanwhile.
    """

    payload: Any = None
    events: AsyncIterator[bytes] | None = None
    status: int = 200
    content: bytes | None = None
    media: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: Callable[[], None] = lambda: None
    unsent: Callable[[], None] = lambda: None


Handle = Callable[[HttpRequest], Awaitable[HttpResponse]]


def as_json(value: object) -> bytes:
    """JSON has no infinities: a log-prob of minus infinity goes as OpenAI's -9999."""
    return json.dumps(_finite(value)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return -9999.0
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
