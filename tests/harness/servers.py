"""A small real HTTP server on this machine that answers as it is told: well, late, wrongly or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import h11

ALIVE = {"/health": (200, {}), "/version": (200, {"version": "0.32.0"}),
         "/v1/models": (200, {"data": [{"id": "tiny", "max_model_len": 64}]})}  # fmt: skip
JSON = {"content-type": "application/json"}


def completion(tokens=(7, 8), log_probs=(-0.1, -0.2), reason="stop", **choice) -> tuple[int, Any]:
    """What vLLM's server answers."""
    logs = {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": list(log_probs)}
    return 200, {
        "choices": [{"text": "x", "token_ids": list(tokens), "logprobs": logs, "finish_reason": reason, **choice}]
    }


class Silence:
    """No answer, the connection stays open."""


class Hangup:
    """The connection ends after these bytes."""

    def __init__(self, raw: bytes = b""):
        self.raw = raw


class ScriptedServer:
    """Answers each path by a function of the payload, or by a list, one entry after the other (the last one stays).

    Args:
        paths: path -> answer, or list of answers, or function(payload) -> answer. An answer is (status, JSON), bytes
            that are sent as they are, a `Silence` or a `Hangup`.
    """

    def __init__(self, paths: dict[str, Any]):
        self.paths = {**ALIVE, **paths}
        self.seen: list[tuple[str, str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_connections = 0
        self._ready = threading.Event()
        self._stop: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, path: str) -> int:
        return sum(seen[1].partition("?")[0] == path for seen in self.seen)

    def payloads(self, path: str) -> list[Any]:
        return [payload for _, seen, payload in self.seen if seen == path]

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        self._ready.set()
        await stopped.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            line = h11.Connection(h11.SERVER)
            while (found := await read_request(line, reader)) is not None:
                if not await self._reply(*found, writer):
                    break
                line = h11.Connection(h11.SERVER)  # what was answered may be no HTTP: it goes past h11
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, request: h11.Request, body: bytes, writer: asyncio.StreamWriter) -> bool:
        path = request.target.decode()
        payload = json.loads(body) if body else None
        self.seen.append((request.method.decode(), path, payload))
        self.headers.append({name.decode(): value.decode() for name, value in request.headers})
        found = self.paths.get(path.partition("?")[0], (404, {"error": "no such path"}))
        if callable(found):
            found = found(payload)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, Silence):
            await asyncio.sleep(3600)
        if isinstance(found, Hangup):
            writer.write(found.raw)
            return False
        writer.write(found if isinstance(found, bytes) else raw(*found))
        await writer.drain()
        return True


async def read_request(line: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes] | None:
    """The next request and its body; None at the end of the connection."""
    request, body = None, b""
    while True:
        event = line.next_event()
        if event is h11.NEED_DATA:
            line.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return request, body
        else:
            return None


def raw(status: int, body: Any, **headers: str) -> bytes:
    text = json.dumps(body).encode()
    head = {**JSON, **headers, "content-length": str(len(text))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode() + text


@contextmanager
def serving(paths: dict[str, Any]):
    server = ScriptedServer(paths)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server._ready.wait(60)
    try:
        yield server
    finally:
        server._stop()
        thread.join(10)
