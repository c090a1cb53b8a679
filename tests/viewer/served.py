"""A server of the page in this process, and requests to it as a browser or a program sends them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from verl.viewer.api import make_server
from verl.viewer.run import ViewedRun

TOKEN = "right"


@dataclass
class Reply:
    """What came back; headers by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Site:
    """The server at a port."""

    port: int

    def send(self, path: str, token: str | None = TOKEN, **headers: str) -> Reply:
        """A request; underscores in names of headers become dashes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        connection.request("GET", path, headers=sent)
        answer = connection.getresponse()
        reply = Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return reply

    def get(self, name: str, **parameters: Any) -> Any:
        """The JSON that a question gets."""
        reply = self.send(f"/api/{name}?{urlencode(parameters, doseq=True)}")
        assert reply.status == 200, reply.body
        return reply.json

    def refused(self, name: str, status: int = 400, **parameters: Any) -> dict[str, Any]:
        """The error that a question gets."""
        reply = self.send(f"/api/{name}?{urlencode(parameters, doseq=True)}")
        assert reply.status == status, reply.body
        return reply.json["error"]

    def indexed(self, name: str, **parameters: Any) -> Any:
        """As `get`, once all files are in the index; each answer takes some more of them in."""
        answer = self.get(name, **parameters)
        while answer["indexed"]["files"] < answer["indexed"]["of"]:
            answer = self.get(name, **parameters)
        return answer


@contextmanager
def served(*runs: ViewedRun | Path) -> Iterator[Site]:
    """A server of these runs, or of runs in these folders."""
    server = make_server([run if isinstance(run, ViewedRun) else ViewedRun(run) for run in runs], TOKEN)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    def serve() -> None:
        loop.run_until_complete(server.start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=serve, name="viewer")
    thread.start()
    ready.wait()
    try:
        yield Site(server.port)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
