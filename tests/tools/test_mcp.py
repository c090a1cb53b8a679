"""A real MCP server as a set of tools: over standard input and over HTTP, when it works and when it dies."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mcp.types import ListToolsResult

from verl.errors import ConfigError, DataError
from verl.metrics import notices
from verl.ports import free_port
from verl.tools.loading import load_tools
from verl.tools.mcp_base_tool import MCPBaseTool, mcp_schema, result_text
from verl.tools.mcp_server import LAST_WORDS, McpFailure, McpServer, ServerSpec

SERVER = str(Path(__file__).with_name("mcp_example_server.py"))
STDIO = {"command": sys.executable, "args": [SERVER], "env": {"GIVEN": "a gift"}}


def tools_of(folder: Path, server: dict, selected=None, **config):
    """The tools by name of one server, through upstream's two files."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"example": server}}))
    entry = {
        "class_name": "verl.tools.mcp_base_tool.MCPBaseTool",
        "config": {"type": "mcp", **config},
        "mcp": {"mcp_servers_config_path": str(folder / "servers.json"), "tool_selected_list": selected or []},
    }
    (folder / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return load_tools(str(folder / "tools.yaml"))


def call(tool, **arguments):
    answer, reward, metrics = asyncio.run(tool.execute("one", arguments))
    assert reward is None
    return answer.text, metrics


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    found = tools_of(tmp_path_factory.mktemp("mcp"), STDIO, timeout=20)
    yield found
    asyncio.run(found["multiply"].close())


def test_the_tools_of_a_server_are_found_with_their_schemas(tools):
    assert list(tools) == ["multiply", "who", "fail", "sleep", "die", "shout", "much"]
    schema = tools["multiply"].get_openai_tool_schema().for_template()["function"]
    assert schema["description"] == "The product of two numbers."
    assert {n: p["type"] for n, p in schema["parameters"]["properties"].items()} == {"a": "integer", "b": "integer"}
    assert schema["parameters"]["required"] == ["a", "b"]


def test_a_call_is_answered_and_all_calls_share_one_server(tools):
    assert call(tools["multiply"], a=6, b=7) == ("42", {"mcp_failed": 0.0, "mcp_restarts": 0})

    async def many():
        return await asyncio.gather(*(tools["multiply"].execute("i", {"a": i, "b": i}) for i in range(50)))

    assert [answer.text for answer, _, _ in asyncio.run(many())] == [str(i * i) for i in range(50)]
    assert call(tools["who"])[0] == call(tools["who"])[0]


def test_the_server_gets_the_variables_that_it_is_given_and_none_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY", "a secret")
    found = tools_of(tmp_path, STDIO, ["who"])
    assert list(found) == ["who"]
    assert call(found["who"])[0].split(" ", 1)[1] == "no canary a gift"
    asyncio.run(found["who"].close())


def test_errors_of_a_tool_and_wrong_arguments_are_messages_to_the_model(tools):
    text, metrics = call(tools["fail"])
    assert text.startswith("Error:") and metrics["mcp_failed"] == 1.0
    assert call(tools["multiply"], a="x")[0].startswith("Error:")
    assert call(tools["multiply"], a=2, b=3)[0] == "6"


def test_a_slow_call_is_given_up_and_the_server_goes_on(tmp_path):
    found = tools_of(tmp_path, STDIO, timeout=3)
    assert call(found["sleep"], seconds=15)[0] == "Error: sleep did not answer within 3 seconds"
    assert call(found["multiply"], a=2, b=3) == ("6", {"mcp_failed": 0.0, "mcp_restarts": 0})
    asyncio.run(found["sleep"].close())


def test_a_server_that_dies_is_started_again_so_often_and_then_no_more(tmp_path):
    found = tools_of(tmp_path, STDIO, max_restarts=1)
    before = call(found["who"])[0]
    assert call(found["die"])[0] == "Error: the server 'example' died during this call"
    after, metrics = call(found["who"])
    assert after.split()[0] != before.split()[0] and metrics == {"mcp_failed": 0.0, "mcp_restarts": 1}
    call(found["die"])
    assert call(found["multiply"], a=1, b=1)[0] == "Error: the server 'example' died 2 times and is not started again"
    assert any("the end is near" in text for text in notices().values()), "its last words are shown"
    for process in (before, after):
        assert not Path("/proc", process.split()[0]).exists(), "nothing is left behind"


def test_closing_ends_the_process_of_the_server(tmp_path):
    found = tools_of(tmp_path, STDIO, ["who"])
    process = Path("/proc", call(found["who"])[0].split()[0])
    assert process.exists()
    asyncio.run(found["who"].close())
    assert not process.exists()


def test_a_server_is_reached_over_streamable_http_and_its_death_is_a_message(tmp_path):
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as line:
                if line.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        found = tools_of(tmp_path, {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "t"}, timeout=10)
        assert call(found["multiply"], a=6, b=7)[0] == "42"
        assert call(found["fail"])[0].startswith("Error:")
        process.kill()
        process.wait(20)
        text, metrics = call(found["multiply"], a=6, b=7)
        assert text.startswith("Error:") and metrics["mcp_failed"] == 1.0
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize(
    "server, said",
    [
        ({"command": "no-such-program-anywhere"}, "cannot be reached"),
        ({"command": sys.executable, "args": ["-c", "print('not MCP')"]}, "cannot be reached"),
        ({"command": "x", "url": "http://y"}, "either started by a command or reached at a url"),
        ({"command": "x", "arg": ["y"]}, "Did you mean 'args'"),
    ],
)
def test_a_server_that_cannot_work_is_an_error_before_the_run(tmp_path, server, said):
    with pytest.raises(ConfigError, match=said):
        tools_of(tmp_path, server, start_timeout=20)


def test_a_tool_that_no_server_offers_is_an_error_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'multiply'"):
        tools_of(tmp_path, STDIO, ["multiplay"])


def test_a_misspelt_setting_and_a_missing_file_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'timeout'"):
        MCPBaseTool.from_config({"config": {"timeot": 1}, "mcp": {"mcp_servers_config_path": "x"}})
    with pytest.raises(ConfigError, match="no such file"):
        MCPBaseTool.from_config({"mcp": {"mcp_servers_config_path": str(tmp_path / "none.json")}})
    with pytest.raises(ConfigError, match="mcp_servers_config_path"):
        MCPBaseTool.from_config({"config": {}})


def test_parts_that_are_no_text_are_named():
    parts = [{"type": "text", "text": "a"}, {"type": "image", "mimeType": "image/png", "data": "xx"},
             {"type": "resource", "resource": {"uri": "u", "text": "b"}}]  # fmt: skip
    assert result_text({"content": parts}) == "a\n[image: image/png]\nb"
    assert result_text({"content": [], "structuredContent": {"x": 1}}) == '{"x": 1}'


def test_images_of_a_server_are_shown_to_a_model_that_sees():
    """A part and a resource. A text model gets their types, as any model does for an image that cannot be read."""
    red, blue = b"red", b"blue"
    parts = [{"type": "text", "text": "a"}, {"type": "image", "mimeType": "image/png", "data": "cmVk"},
             {"type": "resource", "resource": {"uri": "u", "mimeType": "image/png", "blob": "Ymx1ZQ=="}}]  # fmt: skip

    async def answer_of(*_):
        return {"content": parts}

    answering = SimpleNamespace(call=answer_of, restarts=0)
    tool = MCPBaseTool({}, mcp_schema({"name": "look"}), answering)
    answers = []

    def load(images, where, first):
        if images[0]["bytes"] == b"damaged":
            raise DataError("not an image")
        return images

    for processor in (object(), None):
        trajectory = SimpleNamespace(seen=SimpleNamespace(processor=processor, load=load))
        answers.append(asyncio.run(tool.execute("", {}, agent_data=trajectory))[0])
    assert answers[0].text == "a" and answers[0].image == [{"bytes": red}, {"bytes": blue}]
    assert answers[1].text == "a\n[image: image/png]\n[resource: image/png]" and answers[1].image is None
    for damaged in ("c", "ZGFtYWdlZA==", None, 7):
        parts[1]["data"] = damaged
        sees = SimpleNamespace(seen=SimpleNamespace(processor=object(), load=load))
        answer = asyncio.run(tool.execute("", {}, agent_data=sees))[0]
        assert (answer.text, answer.image) == ("a\n[image: image/png]", [{"bytes": blue}])


def test_videos_of_a_server_are_shown_to_a_model_that_takes_them():
    parts = [{"type": "resource", "resource": {"uri": "u", "mimeType": "video/mp4", "blob": "cmVk"}}]

    async def answer_of(*_):
        return {"content": parts}

    def taken(videos, where, first):
        return videos

    def refused(videos, where, first):
        raise DataError("the model takes images and no videos")

    tool = MCPBaseTool({}, mcp_schema({"name": "look"}), SimpleNamespace(call=answer_of, restarts=0))
    answers = []
    for load_videos in (taken, refused):
        trajectory = SimpleNamespace(seen=SimpleNamespace(processor=object(), load_videos=load_videos))
        answers.append(asyncio.run(tool.execute("", {}, agent_data=trajectory))[0])
    assert (answers[0].text, answers[0].image, answers[0].video) == ("", None, [{"bytes": b"red"}])
    assert (answers[1].text, answers[1].video) == ("[resource: video/mp4]", None)


def test_what_a_server_writes_to_its_standard_error_is_read_and_not_kept(tools):
    text, metrics = call(tools["shout"], count=30)
    assert text == "shouted" and metrics["mcp_failed"] == 0.0
    assert len(tools["shout"].server._words._kept) == 4 * LAST_WORDS


class Pages:
    """A session whose list of tools goes on and on."""

    def __init__(self, per_page: int, last: int | None = None):
        self.per_page, self.last, self.asked = per_page, last, 0

    async def list_tools(self, params=None):
        self.asked += 1
        cursor = None if self.asked == self.last else str(self.asked)
        tools = [{"name": f"t{self.asked}-{n}", "inputSchema": {"type": "object"}} for n in range(self.per_page)]
        return ListToolsResult.model_validate({"tools": tools, "nextCursor": cursor})


@pytest.mark.parametrize(
    ("pages", "words"),
    [(Pages(1), "more than 64 pages"), (Pages(0), "more than 64 pages"), (Pages(500), "more than 1024 tools")],
)
def test_a_list_of_tools_without_end_is_refused(monkeypatch, pages, words):
    async def ask(self, what, make, timeout):
        return (await make(pages)).model_dump(mode="json", by_alias=True)

    monkeypatch.setattr(McpServer, "_ask", ask)
    with pytest.raises(McpFailure, match=words):
        asyncio.run(McpServer(ServerSpec("example", command="x")).tools())
    assert pages.asked <= 64
    pages.asked, pages.last, pages.per_page = 0, 3, 2
    assert len(asyncio.run(McpServer(ServerSpec("example", command="x")).tools())) == 6
