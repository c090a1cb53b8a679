"""A function becomes a tool: its schema by signature and docstring, its answer by what it returns."""

from __future__ import annotations

import asyncio
import enum
import threading
from typing import Any, Literal

import pytest

from verl.errors import ConfigError
from verl.tools.base import BaseTool
from verl.tools.function_tool import FunctionTool, function_schema, function_tool, read_docstring
from verl.tools.runner import TimeLimit, ToolRunner, in_thread
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


@function_tool(name="weather")
def weather(city: str, days: int = 1, unit: Literal["c", "f"] = "c", tags: list[str] | None = None) -> str:
    """Tell the weather.

    Of one city only.

    Args:
        city (str): where; a name
            that is long.
        days: how many.

    Returns:
        A sentence.
    """
    return f"{city} {days} {unit}"


def ask(tool: BaseTool, **parameters: Any):
    return asyncio.run(tool.execute("x", parameters))


def test_the_schema_is_read_off_the_function():
    assert weather.tool_schema.for_template() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather. Of one city only.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where; a name that is long."},
                    "days": {"type": "integer", "description": "how many."},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }
    assert isinstance(weather, FunctionTool) and weather("Graz") == "Graz 1 c"


def test_types_become_json_types():
    def f(a: float, b: bool, c: dict[str, int], d: int | str, e: Any, g: Unit, h: list): ...

    found = function_schema(f, "f").for_template()["function"]["parameters"]["properties"]
    assert found["a"] == {"type": "number"} and found["b"] == {"type": "boolean"} and found["c"] == {"type": "object"}
    assert found["d"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]} and found["e"] == {}
    assert found["g"] == {"type": "string", "enum": ["celsius", "fahrenheit"]} and found["h"] == {"type": "array"}


def test_a_function_that_has_no_schema_is_refused_where_it_is_defined():
    with pytest.raises(ConfigError, match=r"f\.a: a parameter of a function tool needs a type"):
        function_tool("f")(lambda a: a)
    with pytest.raises(ConfigError, match="named parameters only"):

        @function_tool()
        def many(*values: int): ...

    with pytest.raises(ConfigError, match="JSON cannot say"):

        @function_tool()
        def odd(value: complex): ...


@pytest.mark.parametrize(
    ("value", "text", "reward"),
    [
        ("plain", "plain", None),
        ({"a": [1, "ä"]}, '{"a": [1, "ä"]}', None),
        (None, "(the tool returned nothing)", None),
        (ToolResponse(text="own"), "own", None),
        (("text", 0.5, {"n": 1}), "text", 0.5),
    ],
)
def test_what_a_function_returns_becomes_the_answer(value, text, reward):
    @function_tool
    def give() -> str:
        return value

    answer, found, _ = ask(give)
    assert (answer.text, found) == (text, reward)


def test_plain_functions_run_beside_each_other_and_coroutines_where_they_are():
    together = threading.Barrier(3)

    @function_tool()
    def slow() -> str:
        together.wait(60)  # for the others, which one after the other would never come
        return "done"

    @function_tool()
    async def quick() -> str:
        return "done"

    async def both():
        return await asyncio.gather(*(tool.execute("x", {}) for tool in (slow, slow, slow, quick)))

    assert [found[0].text for found in asyncio.run(both())] == ["done"] * 4


def test_wrong_arguments_are_told_before_anything_runs():
    with pytest.raises(TypeError, match="missing a required argument: 'city'"):
        ask(weather)
    with pytest.raises(TypeError, match="unexpected keyword argument 'town'"):
        ask(weather, city="x", town="y")


def test_a_docstring_without_sections_is_all_summary():
    assert read_docstring("One\nline.") == ("One line.", {})
    assert read_docstring("") == ("", {})


def test_records_read_and_write_json_and_keep_what_they_do_not_know():
    given = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
                "required": [],
                "additionalProperties": False,
            },
        },
    }
    schema = OpenAIFunctionToolSchema.model_validate(given)
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == given
    assert schema.function.parameters.properties["a"].type == "array"
    with pytest.raises(ConfigError, match="not a complete OpenAIFunctionSchema"):
        OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "f"}})


def test_a_call_on_the_runner_keeps_to_its_time_and_its_loop():
    runner = ToolRunner()

    async def loops():
        async def which():
            return asyncio.get_running_loop()

        return await runner.run(which), await runner.run(which), asyncio.get_running_loop()

    one, other, own = asyncio.run(loops())
    assert one is other and one is not own

    ended, was_cancelled = [], threading.Event()

    async def hang():
        try:
            await asyncio.sleep(60)
            ended.append("by itself")
        finally:
            was_cancelled.set()

    with pytest.raises(TimeLimit, match=r"no answer within 0\.1 seconds"):
        asyncio.run(runner.run(hang, 0.1))
    assert was_cancelled.wait(60) and not ended


def test_an_error_in_a_thread_reaches_the_one_who_waits():
    def fail():
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(in_thread(fail))
