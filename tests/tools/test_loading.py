"""Tools out of upstream's YAML file and out of a Python file, and what is wrong with them."""

from __future__ import annotations

import asyncio

import pytest

from examples.calculator.tool import CalculatorTool
from verl.errors import ConfigError
from verl.tools.gsm8k_tool import Gsm8kTool, same_number
from verl.tools.loading import load_tools

YAML = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config: {type: native}
    tool_schema:
      type: "function"
      function:
        name: "check"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties:
            answer: {type: "string", description: "The answer, ${not.resolved}"}
          required: ["answer"]
  - class_name: examples.calculator.tool.CalculatorTool
"""
PYTHON = '''
from verl.tools.function_tool import function_tool

@function_tool()
def add(a: int, b: int) -> int:
    """Add."""
    return a + b

@function_tool(name="shout")
async def _shout(text: str) -> str:
    return text.upper()
'''


def test_tools_come_from_both_files_in_their_order(tmp_path):
    (tmp_path / "tools.yaml").write_text(YAML)
    (tmp_path / "more.py").write_text(PYTHON)
    tools = load_tools(str(tmp_path / "tools.yaml"), str(tmp_path / "more.py"))
    assert list(tools) == ["check", "calculator", "add", "shout"]
    assert isinstance(tools["check"], Gsm8kTool) and isinstance(tools["calculator"], CalculatorTool)
    described = tools["check"].get_openai_tool_schema().function.parameters.properties["answer"].description
    assert described == "The answer, ${not.resolved}"
    assert asyncio.run(tools["add"].execute("x", {"a": 2, "b": 3}))[0].text == "5"
    assert load_tools(None) == {}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tool: []", "'tools:' with a list of entries"),
        ("tools: [{config: {}}]", r"tools\[0\].*without a class_name"),
        ("tools: [{class_name: os.system}]", "not a tool.*subclass of BaseTool"),
        ("tools: [{class_name: verl.tools.none.X}]", "no module named 'verl.tools.none'"),
        ("tools: [{class_name: verl.tools.base.BaseTool}]", r"tools\[0\].*no schema"),
        ("tools: [{class_name: examples.calculator.tool.CalculatorTool}, "
         "{class_name: examples.calculator.tool.CalculatorTool}]", "two tools have one name"),
        ("tools: !!python/object/apply:os.system [echo]", "not readable as YAML"),
        ("tools: [", "not readable as YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_says_where(tmp_path, text, match):
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_tools(str(path))


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    (tmp_path / "tools.yaml").write_text("tools: []")
    with pytest.raises(ConfigError, match=r"tool_config_path: no such file.*Did you mean 'tools.yaml'"):
        load_tools(str(tmp_path / "tool.yaml"))
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(ConfigError, match="no function tools"):
        load_tools(None, str(tmp_path / "empty.py"))


def test_the_gsm8k_checker_keeps_the_best_score_of_a_trajectory():
    tool = Gsm8kTool({"type": "native"})

    async def play():
        name, _ = await tool.create(None, ground_truth="1,234")
        wrong = await tool.execute(name, {"answer": "7"})
        right = await tool.execute(name, {"answer": "It is $1234.00"})
        again = await tool.execute(name, {"answer": "1234"})
        score = await tool.calc_reward(name)
        await tool.release(name)
        return [found[1] for found in (wrong, right, again)], score

    assert asyncio.run(play()) == ([-0.05, 0.0, -0.05], 1.0)
    with pytest.raises(ValueError, match="ground_truth"):
        asyncio.run(tool.create())


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [("#### 18", "18", True), ("18.0", "18", True), ("-3", "3", False), ("", "3", False), ("3 or 4", "3", False)],
)
def test_the_last_number_counts(answer, truth, same):
    assert same_number(answer, truth) is same
