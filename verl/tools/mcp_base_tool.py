"""Tools of MCP servers, in upstream's form: an entry with ``mcp: {mcp_servers_config_path, tool_selected_list}``."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from verl.config.loading.files import read_user_yaml
from verl.errors import ConfigError, VerlError, suggest
from verl.json_text import check_depth
from verl.tools.base import BaseTool, Executed
from verl.tools.limits import share_of
from verl.tools.mcp_server import McpFailure, McpServer, ServerSpec
from verl.tools.runner import runner
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

FILE_KEY = "mcp.mcp_servers_config_path"
LIST_KEY = "mcp.tool_selected_list"
TIMEOUT = 30.0
SETTINGS = ("type", "timeout", "start_timeout", "max_restarts", "rate_limit", "num_workers")


class MCPBaseTool(BaseTool):
    """One tool of a server. `from_config` makes all of an entry.

    Args:
        config: ``timeout`` (seconds of a call, 30), ``rate_limit`` (most calls at once in the run, 120).
        tool_schema: as the server describes it.
        server: where it is called.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None,
        tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
        server: McpServer | None = None,
    ):
        super().__init__(config, tool_schema)
        if server is None:
            raise ConfigError(
                "an MCP tool needs its server", key="mcp", fix="Give mcp: {mcp_servers_config_path: ...} in its entry."
            )
        self.server = server
        self.timeout = float(self.config.get("timeout") or TIMEOUT)
        self._limit = share_of(int(self.config.get("rate_limit") or self.config.get("num_workers") or 120))
        # A semaphore belongs to one event loop; a loop that was given up takes its own along.
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def from_config(cls, entry: Mapping[str, Any]) -> list[BaseTool]:
        """The selected tools of all servers in the file; each server lists what it offers.

        Raises:
            ConfigError: no such file or tool, or a server that cannot be reached.
        """
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError(
                "MCP tools need the package mcp", key="class_name", fix="In the checkout: pip install -e '.[mcp]'"
            )
        section, config = entry.get("mcp"), dict(entry.get("config") or {})
        if not isinstance(section, Mapping) or not section.get("mcp_servers_config_path"):
            raise ConfigError("a file of MCP servers is needed", key=FILE_KEY)
        for name in config:
            if name not in SETTINGS:
                raise ConfigError(
                    "unknown setting", key=f"config.{name}", allowed=SETTINGS, fix=suggest(name, SETTINGS)
                )
        limits = {name: config[name] for name in ("start_timeout", "max_restarts") if name in config}
        servers = read_servers(str(section["mcp_servers_config_path"]), limits)
        offered = {server: _offered(server) for server in servers}
        names = _selected(section.get("tool_selected_list"), [t["name"] for tools in offered.values() for t in tools])
        return [
            cls(config, mcp_schema(tool), server)
            for server, tools in offered.items()
            for tool in tools
            if names is None or tool["name"] in names
        ]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Call the tool; a failure of the server is an answer that says so, and the metric ``mcp_failed``."""
        try:
            reply = await self._on_its_loop(parameters)
        except McpFailure as failure:
            return (
                ToolResponse(text=f"Error: {failure}"),
                None,
                {"mcp_failed": 1.0, "mcp_restarts": self.server.restarts},
            )
        refused = bool(reply.get("isError"))
        trajectory: Any = kwargs.get("agent_data")
        sees = trajectory is not None and trajectory.seen.processor is not None
        images, videos, parts = list[Any](), list[Any](), list[Any]()
        for part in reply.get("content") or ():
            try:
                if sees and is_image(part):
                    images += trajectory.seen.load([file_of(part)], f"tool {self.name}", first=len(images))
                elif sees and is_video(part):
                    videos += trajectory.seen.load_videos([file_of(part)], f"tool {self.name}", first=len(videos))
                else:
                    parts.append(part)
            except (VerlError, ValueError):  # a kind that is not read, or damaged: the model gets its type
                parts.append(part)
        text = result_text({**reply, "content": parts}) if parts or not (images or videos) else ""
        answer = ToolResponse(text=f"Error: {text}" if refused else text, image=images or None, video=videos or None)
        return answer, None, {"mcp_failed": float(refused), "mcp_restarts": self.server.restarts}

    async def close(self) -> None:
        await runner().run(self.server.close, timeout=20.0)

    def _answer(self, text: str, failed: bool) -> Executed:
        return ToolResponse(text=text), None, {"mcp_failed": float(failed), "mcp_restarts": self.server.restarts}

    async def _on_its_loop(self, parameters: dict[str, Any]) -> dict[str, Any]:
        if asyncio.get_running_loop() is runner().loop():
            return await self._call(parameters)
        return await runner().run(lambda: self._call(parameters))

    async def _call(self, parameters: dict[str, Any]) -> dict[str, Any]:
        # Calls of one event loop, each for its whole length.
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))
        async with places:
            return await self.server.call(self.name, parameters, self.timeout)


def read_servers(path: str, limits: Mapping[str, Any]) -> list[McpServer]:
    """The servers under ``mcpServers`` in a JSON (or YAML) file; a ``disabled`` one is left out.

    Raises:
        ConfigError: no such file, or not of this form.
    """
    content = read_user_yaml(path, FILE_KEY)
    servers = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError('the file needs {"mcpServers": {name: {...}}}', key=FILE_KEY, got=path)
    specs = [ServerSpec.read(str(name), entry, **limits) for name, entry in servers.items() if not _is_off(entry)]
    return [McpServer(spec) for spec in specs]


def mcp_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as an MCP server describes it, in OpenAI's form."""
    parameters = {"type": "object", "properties": {}, **(tool.get("inputSchema") or {})}
    described = str(tool.get("description") or tool.get("title") or tool["name"])
    function = {"name": tool["name"], "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of an answer is an image: an image part, or a resource that is one."""
    resource = part.get("resource") or {}
    named = str(resource.get("mimeType") or "").startswith("image/")
    return part.get("type") == "image" or (named and resource.get("blob") is not None)


def is_video(part: Mapping[str, Any]) -> bool:
    """Whether a part of an answer is a resource that holds a video."""
    resource = part.get("resource") or {}
    return str(resource.get("mimeType") or "").startswith("video/") and resource.get("blob") is not None


def file_of(part: Mapping[str, Any]) -> dict[str, bytes]:
    """The file in a part; raises ValueError where there is none, or it is not base64."""
    data = part.get("data") or (part.get("resource") or {}).get("blob")
    if not isinstance(data, str):
        raise ValueError("a part without data")
    return {"bytes": base64.b64decode(data, validate=True)}


def result_text(result: Mapping[str, Any]) -> str:
    """What a model is shown of a result: its texts; of other parts their kind."""
    parts = []
    for part in result.get("content") or ():
        resource = part.get("resource") or {}
        text = part.get("text") if part.get("type") == "text" else resource.get("text")
        kind = part.get("mimeType") or resource.get("mimeType") or "no text"
        parts.append(text if text is not None else f"[{part.get('type')}: {kind}]")
    if not parts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)


def _offered(server: McpServer) -> list[dict[str, Any]]:
    key, seconds = f"mcpServers.{server.spec.name}", 2 * server.spec.start_timeout + 20.0
    try:
        offered = runner().call(server.tools, timeout=seconds)
        check_depth(offered)
    except McpFailure as failure:
        raise ConfigError(str(failure), key=key) from failure
    except TimeoutError as failure:
        raise ConfigError(f"it did not list its tools within {seconds:g} seconds", key=key) from failure
    except ValueError as failure:
        raise ConfigError(f"what it tells of its tools is {failure}", key=key) from failure
    return offered


def _selected(names: Any, offered: Iterable[str]) -> set[str] | None:
    """The selected names, None for all."""
    if not names:
        return None
    tool_names = list(offered)
    for name in names:
        if name not in tool_names:
            raise ConfigError(
                "no server offers this tool", key=LIST_KEY, got=name, allowed=tool_names, fix=suggest(name, tool_names)
            )
    return set(names)


def _is_off(entry: Any) -> bool:
    return isinstance(entry, Mapping) and bool(entry.get("disabled"))
