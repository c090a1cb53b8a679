"""What no answer of a model may do to a parser: take more time than its length is worth, or nest without end."""

from __future__ import annotations

import gc
import json
import re
import time
from itertools import product

import pytest

from verl.agent_loop.parsers import FunctionCall, Malformed
from verl.agent_loop.parsers.base import MOST_CALLS
from verl.json_text import MAX_DEPTH
from verl.registry import TOOL_PARSERS

SMALL, LARGE = 20_000, 1_000_000
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "p": {"type": "object"}}}}}]  # fmt: skip
CALLS = {
    "hermes": '<tool_call>{{"name": "f", "arguments": {{"p": {}}}}}</tool_call>',
    "llama3_json": '{{"name": "f", "parameters": {{"p": {}}}}}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{{"p": {}}}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{"p": {}}}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt-oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"p": {}}}<|call|>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=p>\n{}\n</parameter>\n</function>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=f>\n<parameter=p>{}</parameter>\n</function>\n</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="p">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="p" string="false">{}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    "glm": "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "gemma4": "<|tool_call>call:f{{p:{}}}<tool_call|>",
}
KEY = {"gemma4": "{k:"}


def parse(family: str, text: str):
    return TOOL_PARSERS.get(family)(None).parse_text(text, TOOLS)


def seconds(family: str, text: str) -> float:
    """Processor time of this thread: neither other processes nor a collection of earlier tests' garbage count."""
    gc.disable()
    try:
        start = time.thread_time()
        parse(family, text)
        return time.thread_time() - start
    finally:
        gc.enable()


def hostile(family: str, length: int) -> dict[str, str]:
    """Texts of a family's tags, whole and cut off, alone and by two, bare, in an open block and in a closed one."""
    call = CALLS[family].format("{}")
    tags = re.findall(r"<[^<>]*>", call) or [call]
    closing = "".join(tag for tag in tags if "/" in tag or "end" in tag)
    bodies = {*tags, *(tag[:-1] for tag in tags), *map("".join, product(tags, tags))}
    bodies |= {"[", "{", '"', '\\"', " ", "\n", "<", '{"a":', ';{"', "<arg_key>a</arg_key>", "\n```", "\n```json\n"}
    found = {}
    for body in sorted(bodies):
        much = body * (length // len(body))
        before = call[: call.index("{}")]
        for number, text in enumerate((much, tags[0] + much, tags[0] + much + closing, before + much + closing)):
            found[f"{number} {body}"] = text
    if family == "deepseek_v3":
        found["fence"] = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>" + " " * length + closing
    return found


def test_every_family_is_tried():
    assert set(CALLS) == set(TOOL_PARSERS.names())


@pytest.mark.parametrize("family", sorted(CALLS))
def test_a_million_characters_take_a_parser_about_fifty_times_as_long_as_twenty_thousand(family):
    small = {name: seconds(family, text) for name, text in hostile(family, SMALL).items()}
    assert sum(small.values()) < 30, "none of them takes seconds"
    large = hostile(family, LARGE)
    for name in sorted(small, key=small.__getitem__)[-3:]:
        taken, before = seconds(family, large[name]), max(small[name], 0.001)
        assert taken < 400 * before, f"{name!r}: {taken:.2f} s; a fiftieth of it took {before:.4f} s"  # not 2500


@pytest.mark.parametrize("family", sorted(CALLS))
def test_an_argument_that_is_nested_too_deeply_makes_no_call_and_raises_nothing(family):
    key = KEY.get(family, '{"k":')
    for depth in (MAX_DEPTH + 1, 900, 3000, 50_000):
        for opened, closed in (("[", "]"), (key, "}")):
            items = parse(family, CALLS[family].format(opened * depth + "1" + closed * depth)).items
            # Where an argument may be text, that is what it stays.
            assert all(isinstance(item, Malformed) or isinstance(arguments(item)["p"], str) for item in items)
    inside = "[" * (MAX_DEPTH - 2) + "1" + "]" * (MAX_DEPTH - 2)  # in some families two objects are around it
    (call,) = parse(family, CALLS[family].format(inside)).items
    assert arguments(call) == {"p": json.loads(inside)} or arguments(call)["p"] == inside


@pytest.mark.parametrize("family", sorted(CALLS))
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000], ids=lambda text: text[:9])
def test_a_number_that_json_does_not_have_makes_no_such_argument(family, number):
    for item in parse(family, CALLS[family].format(f"[{number}]")).items:
        assert isinstance(item, Malformed) or isinstance(arguments(item)["p"], str)


@pytest.mark.parametrize("family", sorted(CALLS))
def test_no_more_calls_are_read_than_the_most(family):
    parsed = parse(family, CALLS[family].format("1") * (MOST_CALLS + 50))
    assert len(parsed.items) <= MOST_CALLS


def arguments(item: FunctionCall | Malformed) -> dict:
    assert isinstance(item, FunctionCall), item
    return json.loads(item.arguments)
