"""A real MCP server as the tool of a rollout: the model's call reaches it, and what it answers is masked."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.harness.conversations import Script, manager, rollout, rows
from tests.harness.models import tiny_tokenizer

SERVER = Path(__file__).resolve().parents[1] / "tools" / "mcp_example_server.py"
ASK = [{"role": "user", "content": "6*7?"}]

pytestmark = pytest.mark.slow


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_model_calls_the_tool_of_a_server_survives_its_death_and_calls_it_again(tmp_path):
    tokenizer = tiny_tokenizer()
    server = {"command": sys.executable, "args": [str(SERVER)]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"example": server}}))
    entry = {
        "class_name": "verl.tools.mcp_base_tool.MCPBaseTool",
        "config": {"type": "mcp", "max_restarts": 1},
        "mcp": {
            "mcp_servers_config_path": str(tmp_path / "servers.json"),
            "tool_selected_list": ["multiply", "die"],
        },
    }
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    said = [call("multiply", a=6, b=7), call("die"), call("multiply", a=7, b=8), "42"]
    said = [f"{text}<|im_end|>" for text in said]
    script = Script([tokenizer(text, add_special_tokens=False)["input_ids"] for text in said])
    settings = rollout(
        multi_turn__enable=True, multi_turn__tool_config_path=str(tmp_path / "tools.yaml"), response_length=2000
    )
    loops = manager(settings, script, tokenizer)
    batch = loops.generate_sequences(rows(ASK))
    ids, mask = batch.batch["responses"][0], batch.batch["response_mask"][0].bool()
    answers = tokenizer.decode(ids[~mask])
    assert tokenizer.decode(ids[mask]) == "".join(said), "mask 1 is what the model wrote and nothing else"
    between = "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    died = "Error: the server 'example' died during this call"
    assert answers == between.format("42") + between.format(died) + between.format("56")
    metrics = batch.meta_info["metrics"]
    assert metrics["tool_calls/multiply/count"].value == 2
    assert metrics["tool_calls/die/mcp_failed"].value == 1.0
    (tool,) = [t for t in loops.here.loops.of({}).shared.calls.tools.values() if t.name == "die"]
    asyncio.run(tool.close())
