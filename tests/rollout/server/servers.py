"""A small real HTTP server on this machine that answers as it is told: well, late, wrongly or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from verl.rollout.server.wire import Message, read_message, render

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
        try:
            while (message := await read_message(reader, is_answer=False)) is not None:
                if not await self._reply(message, writer):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, message: Message, writer: asyncio.StreamWriter) -> bool:
        path = message.start[1]
        payload = message.json() if message.body else None
        self.seen.append((message.start[0], path, payload))
        self.headers.append(message.headers)
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


def raw(status: int, body: Any, **headers: str) -> bytes:
    return render(f"HTTP/1.1 {status} X", {**JSON, **headers}, json.dumps(body).encode())


@contextmanager
def serving(paths: dict[str, Any]):
    server = ScriptedServer(paths)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server._ready.wait(10)
    try:
        yield server
    finally:
        server._stop()
        thread.join(10)
