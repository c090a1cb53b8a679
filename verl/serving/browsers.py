"""How a page in a browser is let in: by a link with the token, which becomes a cookie, and from no other site.

A browser sends cookies wherever a page of any site makes it ask, and cookies of one port to every other port of the
same host. Hence besides the cookie the request must come from the page itself: its Origin and the browser's
Sec-Fetch-Site say where it comes from. The Host header, which the server checks, stops names of other sites that lead
to this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Message, Send

from verl.serving import secret
from verl.serving.answers import ApiError

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer: what the policy wrote stays text, and nothing is loaded from or sent to another place."""
LOGIN, TOKEN = "/", "token"
SESSIONS = 64
"""Browsers that are logged in at once; a further one ends the session of the first."""


@dataclass
class BrowserAccess:
    """The declared mode of a server that has a page.

    Args:
        name: of the cookie, before the port.
        headers: of every answer that does not set them itself.
    """

    name: str
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)
    _sessions: dict[str, object] = field(default_factory=dict)

    def is_login(self, request: Request) -> bool:
        """Whether it is the link that a person opens."""
        return request.method == "GET" and request.url.path == LOGIN and TOKEN in request.query_params

    def login(self, request: Request, authorize: Callable[[str], object], port: int) -> Response:
        """The answer to the link: the cookie, and the address without the token.

        Raises:
            ApiError: the token is wrong.
        """
        owner = authorize(request.query_params[TOKEN])
        if owner is None:
            raise ApiError(401, "The token of this link is not the server's: open the link that it printed last.")
        session = secret.new_key()
        self._sessions[session] = owner
        while len(self._sessions) > SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        answer = RedirectResponse(LOGIN, 303)
        answer.set_cookie(self._cookie(port), session, path="/", httponly=True, samesite="strict")
        return answer

    def owner_of(self, request: Request, port: int) -> object:
        """Whom the cookie belongs to.

        Raises:
            ApiError: there is none, or it is of another run of the server.
        """
        cookie = request.cookies.get(self._cookie(port), "")
        for session, owner in self._sessions.items():
            if secret.same(session, cookie):
                return owner
        raise ApiError(401, "This browser is not logged in: open the link that the program printed.")

    def check_source(self, request: Request) -> None:
        """Refuse what another site makes the browser send; a link that a person follows is no such request.

        Raises:
            ApiError: it is.
        """
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        is_link = request.headers.get("sec-fetch-mode") == "navigate"
        if origin not in (None, f"http://{request.headers['host']}") or (
            site not in ("none", "same-origin") and not is_link
        ):
            raise ApiError(403, "Requests of web pages of other sites are not answered.", "forbidden")

    def with_headers(self, send: Send) -> Send:
        """Put the headers on every answer."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in self.headers.items()]
                message = {**message, "headers": [*message["headers"], *(one for one in more if one[0] not in present)]}
            await send(message)

        return sent

    def _cookie(self, port: int) -> str:
        return f"{self.name}_{port}"
