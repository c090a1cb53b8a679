"""What pages on agents, tools, the sandbox and models print is run as it stands there; sizes may shrink."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.printed import bash, block, rewards
from tests.docs.test_statements import blocks
from tests.harness.programs import python
from tests.harness.runs import records
from tests.harness.sandboxes import OFFERED
from tests.sanity.source_tree import ROOT
from verl.tools.loading import load_tools

QUICKSTART = "docs/start/quickstart.md"
TURNS, SANDBOX, ENDPOINT, MCP = (f"docs/howto/{name}.md" for name in ("multi_turn", "sandbox", "endpoint", "mcp"))
MODELS, SEEING = "docs/howto/models.md", "docs/concepts/vision_models.md"
RUN: dict[str, tuple[str, ...]] = {
    TURNS: ("python examples/calculator/make.py", "# my_tools.py"),
    SANDBOX: ("from verl.sandbox import",),
    ENDPOINT: ("# agent.py", "verl train grpo"),
    MCP: ("# sums.py",),
    MODELS: ("model=my/base",),
    SEEING: ("python examples/vision/make_model.py",),
}
NOT_RUN: dict[str, dict[str, str]] = {}


def files(folder: Path, *named: str) -> None:
    """Write the blocks that begin with the name of a file, as comments of Python and YAML do."""
    for text in named:
        (folder / re.split(r"[ ;:\n]", text)[1]).write_text(text)


def yaml(page: str, name: str) -> str:
    (found,) = [one for one in blocks(ROOT / page, "yaml") if one.startswith(f"# {name}")]
    return found


@pytest.mark.slow
def test_the_page_of_turns_fine_tunes_a_model_that_calls_its_tool(tmp_path):
    printed = bash(tmp_path, block(TURNS, "python examples/calculator/make.py"))
    before, after = (float(value) for value in re.findall(r"val-core/products/reward/mean@1:([\d.e-]+)", printed))
    assert before < 0.3 and after > 0.75, printed[-2000:]
    rows = records(tmp_path / "my/calculator/dump/1.jsonl")
    called = [row for row in rows if row["tool_call_counts"]]
    assert called and called[0]["trajectory"][1]["calls"][0]["name"] == "calculator"


def test_the_tools_of_the_page_of_turns_load_and_answer(tmp_path, monkeypatch):
    files(tmp_path, yaml(TURNS, "tools.yaml"), block(TURNS, "# my_tools.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    tools = load_tools(str(tmp_path / "tools.yaml"), str(tmp_path / "my_tools.py"))
    assert list(tools) == ["weather", "add"]

    async def used():
        weather = tools["weather"]
        one, _ = await weather.create()
        answer, reward, _ = await weather.execute(one, {"city": "Basel"})
        total, _, _ = await tools["add"].execute(one, {"a": 2, "b": 3})
        return answer.text, reward, await weather.calc_reward(one), total.text

    assert asyncio.run(used()) == ("wet", 0.1, 1.0, "5")


def test_the_page_of_the_sandbox_prints_what_its_comments_say(tmp_path):
    if "whole" not in OFFERED:
        return
    script = block(SANDBOX, "from verl.sandbox import")
    (tmp_path / "programs.py").write_text(script)
    said = [line.partition(")  # ")[2] for line in script.splitlines() if line.strip().startswith("print(")]
    assert python("programs.py", cwd=tmp_path).stdout.split("\n")[:-1] == said


@pytest.mark.slow
def test_the_page_of_the_endpoint_trains_the_agent_that_it_prints(fine_tuned):
    files(fine_tuned, block(ENDPOINT, "# agent.py"), yaml(ENDPOINT, "loops.yaml"))
    printed = bash(fine_tuned, block(ENDPOINT, "verl train grpo"), total_training_steps="3")
    assert len(rewards(printed)) == 3 and max(rewards(printed)) > 0.1, printed[-2000:]
    assert set(map(float, re.findall(r"rollout/agent/calls:([\d.]+)", printed))) == {2}
    assert set(map(float, re.findall(r"rollout/agent/failed:([\d.]+)", printed))) == {0}


def test_the_server_of_the_page_of_mcp_multiplies(tmp_path, monkeypatch):
    (servers,) = blocks(ROOT / MCP, "json")
    files(tmp_path, block(MCP, "# sums.py"), yaml(MCP, "tools.yaml"))
    (tmp_path / "servers.json").write_text(servers)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    tools = load_tools("tools.yaml")
    assert list(tools) == ["multiply"]
    answer, _, _ = asyncio.run(tools["multiply"].execute("one", {"a": 6, "b": 7}))
    assert answer.text == "42"


@pytest.mark.slow
def test_the_check_of_a_model_family_compares_sampler_and_trainer(fine_tuned):
    printed = bash(fine_tuned, block(MODELS, "model=my/base"))
    (difference,) = re.findall(r"training/rollout_probs_diff_max:([\d.e-]+)", printed)
    assert float(difference) < 1e-5


@pytest.mark.slow
def test_the_page_of_models_that_see_trains_on_images(tmp_path):
    printed = bash(tmp_path, block(SEEING, "python examples/vision/make_model.py"), total_training_steps="1")
    (saved,) = tmp_path.glob("runs/grpo-*")
    assert len(rewards(printed)) == 1 and (saved / "metrics.jsonl").is_file()
