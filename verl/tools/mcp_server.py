"""The connection to one MCP server: opened when it is needed, opened again a bounded number of times when it dies.

A server belongs to the tools' event loop, which lives as long as the process. The protocol itself is the ``mcp``
package's (extra ``mcp``): https://modelcontextprotocol.io.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl import env, lifeline
from verl.errors import ConfigError, suggest
from verl.metrics import notice

CONNECTION_CLOSED = -32000
STDIO = ("command", "args", "env", "cwd")
HTTP = ("url", "headers", "auth_token")
BOTH = ("type", "transport", "timeout", "description", "disabled", "name")
LAST_WORDS = 500
MOST_PAGES, MOST_TOOLS = 64, 1024
"""Most pages that are read of a server's list of tools, and most tools of a server."""


class McpFailure(Exception):
    """A call that has no result; the text is meant for the model."""


@dataclass(frozen=True)
class ServerSpec:
    """How a server is reached: a command that is started, or a URL (streamable HTTP).

    Args:
        name: for messages.
        start_timeout: seconds until it must have answered for the first time.
        max_restarts: how often it is started again after it died.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 30.0
    max_restarts: int = 3

    @classmethod
    def read(cls, name: str, entry: object, **limits: Any) -> ServerSpec:
        """The entry of a server in ``mcpServers``; ``~`` and ``${VARIABLES}`` in it are expanded.

        Raises:
            ConfigError: neither a command nor a url, or an unknown field.
        """
        key = f"mcpServers.{name}"
        if not isinstance(entry, Mapping) or bool(entry.get("command")) == bool(entry.get("url")):
            raise ConfigError(
                "an MCP server is either started by a command or reached at a url", key=key, allowed=(*STDIO, *HTTP)
            )
        allowed = (*(STDIO if entry.get("command") else HTTP), *BOTH)
        for field_name in entry:
            if field_name not in allowed:
                raise ConfigError(
                    "unknown field", key=f"{key}.{field_name}", allowed=allowed, fix=suggest(field_name, allowed)
                )
        headers = {str(k): env.expand(str(v)) for k, v in dict(entry.get("headers") or {}).items()}
        if entry.get("auth_token"):
            headers.setdefault("Authorization", f"Bearer {env.expand(str(entry['auth_token']))}")
        return cls(
            name=name,
            command=env.expand(str(entry["command"])) if entry.get("command") else None,
            args=tuple(env.expand(str(word)) for word in entry.get("args") or ()),
            env={str(k): env.expand(str(v)) for k, v in dict(entry.get("env") or {}).items()},
            cwd=env.expand(str(entry["cwd"])) if entry.get("cwd") else None,
            url=str(entry["url"]) if entry.get("url") else None,
            headers=headers,
            **limits,
        )


class StderrTail:
    """What a process writes to its standard error: all of it is read, the end is kept.

    Attributes:
        file: where it writes; nothing of it is on a disk.
    """

    def __init__(self) -> None:
        self._source, target = os.pipe()
        self.file = os.fdopen(target, "w")
        self._kept = b""
        self._is_over = threading.Event()
        threading.Thread(target=self._read, name="last words", daemon=True).start()

    def close(self) -> None:
        """Let go of this process's end; what the other one still writes is read."""
        self.file.close()

    def text(self) -> str:
        """Its last words; after its end, all that it wrote is seen."""
        self._is_over.wait(0.2)
        return self._kept.decode("utf-8", "replace").strip()[-LAST_WORDS:]

    def _read(self) -> None:
        while piece := os.read(self._source, 1 << 16):
            self._kept = (self._kept + piece)[-4 * LAST_WORDS :]
        os.close(self._source)
        self._is_over.set()


@dataclass
class _OpenServer:
    """An open connection, held open by a task of its own until ``stop`` is set."""

    session: Any
    task: asyncio.Task[None]
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop


class McpServer:
    """One server, shared by all tools of it and all trajectories. All methods belong to the tools' event loop.

    Args:
        spec: how it is reached.
    """

    def __init__(self, spec: ServerSpec):
        self.spec = spec
        self.restarts = 0
        self._link: _OpenServer | None = None
        self._opening: asyncio.Lock | None = None
        self._words: StderrTail | None = None
        self._was_up = False

    async def tools(self) -> list[dict[str, Any]]:
        """What it offers: ``name``, ``description`` and ``inputSchema`` of each tool.

        Raises:
            McpFailure: it cannot be reached, or its list has no end.
        """
        listed: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await self._ask("tools/list", partial(_list_tools, cursor), self.spec.start_timeout)
            listed += page.get("tools", [])
            cursor = page.get("nextCursor")
            if len(listed) > MOST_TOOLS:
                raise McpFailure(f"the server {self.spec.name!r} offers more than {MOST_TOOLS} tools")
            if not cursor:
                return listed
        raise McpFailure(f"the list of tools of the server {self.spec.name!r} has more than {MOST_PAGES} pages")

    async def call(self, tool: str, arguments: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The result of a call: ``content``, ``isError``, ``structuredContent``.

        Raises:
            McpFailure: it took too long, was refused, or the server died; it is never sent twice.
        """
        return await self._ask(tool, lambda session: session.call_tool(tool, arguments), timeout)

    async def close(self) -> None:
        """End the connection and a process that was started for it."""
        link, self._link = self._link, None
        if link is not None and link.loop is asyncio.get_running_loop():
            link.stop.set()
            await asyncio.wait({link.task}, timeout=10.0)
            link.task.cancel()

    async def _ask(self, what: str, make: Any, timeout: float) -> dict[str, Any]:
        link = await self._open()
        call = asyncio.ensure_future(make(link.session))
        try:
            await asyncio.wait({call, link.task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not call.done() and not link.task.done():
                raise McpFailure(f"{what} did not answer within {timeout:g} seconds")
            if not call.done():
                raise ConnectionError("the connection ended")
            return call.result().model_dump(mode="json", by_alias=True)
        except McpFailure:
            raise
        except Exception as error:  # boundary: whatever a server or the package makes of a call
            if _is_answer(error):
                raise McpFailure(f"{what} was refused: {error}") from error
            await self.close()
            notice(f"the MCP server {self.spec.name!r}", f"died during a call of {what}: {self._why(error)}")
            raise McpFailure(f"the server {self.spec.name!r} died during this call") from error
        finally:
            call.cancel()

    async def _open(self) -> _OpenServer:
        loop = asyncio.get_running_loop()
        if self._link is not None and self._link.loop is not loop:
            self._link, self._opening = None, None  # that loop was given up with all that ran on it
        self._opening = self._opening or asyncio.Lock()  # calls that find no connection: one of them opens it
        async with self._opening:
            if self._link is not None and not self._link.task.done():
                return self._link
            if self._was_up:
                self._count_restart()
            self._link = await self._connect(loop)
            self._was_up = True
            return self._link

    def _count_restart(self) -> None:
        if self.restarts >= self.spec.max_restarts:
            raise McpFailure(f"the server {self.spec.name!r} died {self.restarts + 1} times and is not started again")
        self.restarts += 1
        again = f"is started again after it died, at most {self.spec.max_restarts} times"
        notice(f"the MCP server {self.spec.name!r}, restarts", again)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _OpenServer:
        ready: asyncio.Future[Any] = loop.create_future()
        stop = asyncio.Event()
        task = asyncio.ensure_future(self._hold(ready, stop))
        await asyncio.wait({ready, task}, timeout=self.spec.start_timeout, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return _OpenServer(ready.result(), task, stop, loop)
        if task.done():
            why = self._why(task.exception() or ConnectionError("it ended"))
        else:
            task.cancel()
            await asyncio.wait({task}, timeout=10.0)
            why = f"no answer within {self.spec.start_timeout:g} seconds; {self._stderr_tail()}"
        self._was_up = True  # a further attempt is a restart
        raise McpFailure(f"the server {self.spec.name!r} cannot be reached: {why}")

    async def _hold(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        """Keep the connection open: the package wants it to be entered and left by one task."""
        from mcp import ClientSession  # an optional package

        async with AsyncExitStack() as stack:
            streams = await stack.enter_async_context(await self._transport(stack))
            session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
            await session.initialize()
            if not ready.done():
                ready.set_result(session)
            await stop.wait()

    async def _transport(self, stack: AsyncExitStack) -> AbstractAsyncContextManager[Any]:
        spec = self.spec
        if spec.url is not None:
            from mcp.client.streamable_http import streamable_http_client
            from mcp.shared._httpx_utils import create_mcp_http_client

            client = await stack.enter_async_context(create_mcp_http_client(headers=dict(spec.headers)))
            return streamable_http_client(spec.url, http_client=client)
        from mcp.client.stdio import StdioServerParameters, stdio_client

        assert spec.command is not None
        command, *arguments = lifeline.guarded([spec.command, *spec.args])
        words = StdioServerParameters(command=command, args=arguments, env=dict(spec.env), cwd=spec.cwd)
        self._words = StderrTail()
        stack.callback(self._words.close)
        return stdio_client(words, errlog=self._words.file)

    def _why(self, error: BaseException) -> str:
        while inner := getattr(error, "exceptions", ()):  # a group
            error = inner[0]
        return f"{type(error).__name__}: {error}; {self._stderr_tail()}"

    def _stderr_tail(self) -> str:
        if self.spec.url is not None:
            return f"it was reached at {self.spec.url}"
        text = self._words.text() if self._words is not None else ""
        return f"it said {text!r}" if text else "it said nothing"


async def _list_tools(cursor: str | None, session: Any) -> Any:
    if cursor is None:
        return await session.list_tools()
    from mcp.types import PaginatedRequestParams

    return await session.list_tools(params=PaginatedRequestParams(cursor=cursor))


def _is_answer(error: Exception) -> bool:
    """Whether the server answered with an error, as opposed to not being there any more."""
    from mcp.shared.exceptions import MCPError

    return isinstance(error, MCPError) and error.code != CONNECTION_CLOSED
