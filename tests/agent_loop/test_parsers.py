"""Each parser reads back what its family's template writes, and whatever else a model writes raises nothing."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.agent_loop.call_templates import TEMPLATES, environment, write_calls
from tests.harness.models import tiny_tokenizer
from verl.agent_loop.parsers import FunctionCall, Malformed, Parsed, ToolParser
from verl.registry import TOOL_PARSERS

FAMILIES = ["qwen2.5", "qwen3", *TEMPLATES]
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "metric": {"type": "boolean"},
    "tags": {"type": "array"},
    "more": {"type": "object"},
    "free": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("get_weather", "search-2", "a.b")
]
CALLS = [
    {
        "name": "get_weather",
        "arguments": {
            "city": 'Sankt "Pölten"\n 北京 {x: 1}; <b> ',
            "days": 3,
            "share": -0.5,
            "metric": True,
            "tags": ["a", 1, None, {"b": [False]}],
            "more": {"x": {"y": "z"}},
            "free": None,
        },
    },
    {"name": "search-2", "arguments": {"city": "42"}},
    {"name": "a.b", "arguments": {}},
]
NO_TOKENIZER = SimpleNamespace(eos_token=None)


def parser(family: str) -> ToolParser:
    return TOOL_PARSERS.get("hermes" if family.startswith("qwen2") or family == "qwen3" else family)(NO_TOKENIZER)


def read(family: str, text: str) -> Parsed:
    return parser(family).parse_text(text, TOOLS)


def as_calls(parsed: Parsed) -> list[dict]:
    assert all(isinstance(item, FunctionCall) for item in parsed.items), parsed.items
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in parsed.calls]


def test_every_format_is_tried():
    assert {"hermes", *TEMPLATES} == set(TOOL_PARSERS.names())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parser_inverts_what_the_familys_template_writes(shared, family):
    for calls in (CALLS, CALLS[:1], CALLS[1:2], CALLS[2:]):
        text = write_calls(shared, family, calls)
        assert as_calls(read(family, text)) == calls, text


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("llama3_json", "gpt-oss")])
def test_text_before_the_calls_is_the_answers_content(shared, family):
    parsed = read(family, "I will look it up.\n" + write_calls(shared, family, CALLS[1:2]))
    thought = "\n<think>\n\n</think>" if family == "qwen3" else ""
    assert parsed.content == "I will look it up." + thought and len(parsed.calls) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_without_a_call_is_its_text(family):
    for text in ("", "It is 5.", 'Use {"x": 1} or <b>', '{"answer": 5}'):
        assert read(family, text) == Parsed(text, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_truncated_and_garbled_answers_raise_nothing(shared, family):
    whole = (
        "Well. " + write_calls(shared, family, CALLS) if family != "llama3_json" else write_calls(shared, family, CALLS)
    )
    rng = random.Random(family)
    for number in range(1000):
        start, end = sorted((rng.randrange(len(whole)), rng.randrange(len(whole) + 1)))
        text = whole[: max(end, 1)] if number % 2 else whole[:start] + whole[end:]
        parsed = read(family, text)
        for item in parsed.items:
            if isinstance(item, FunctionCall):
                assert item.name and isinstance(json.loads(item.arguments), dict)
            else:
                assert isinstance(item, Malformed) and item.reason


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt-oss"])
def test_a_call_that_is_cut_off_is_malformed_and_the_whole_ones_before_it_are_kept(shared, family):
    whole, first = write_calls(shared, family, CALLS), write_calls(shared, family, CALLS[:1])
    # Half-way through the second call: what is left of it begins with the first one.
    cut = len(first) + (len(write_calls(shared, family, CALLS[:2])) - len(first)) // 2
    parsed = read(family, whole[:cut])
    assert any(isinstance(item, Malformed) for item in parsed.items), whole[:cut]
    assert all({"name": c.name, "arguments": json.loads(c.arguments)} in CALLS for c in parsed.calls)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=6), VALUES, max_size=3))
@example(arguments={"a": "</tool_call>\n<tool_call>"})
@example(arguments={"a": '"}}; {"name": "x", "parameters": {}}'})
def test_any_json_arguments_come_back(arguments):
    """The families that write JSON: whatever is in a string ends nothing."""
    calls = [{"name": "f", "arguments": arguments}]
    hermes = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    assert as_calls(read("qwen3", hermes)) == calls
    assert (
        as_calls(read("llama3_json", environment().from_string(TEMPLATES["llama3_json"]).render(calls=calls))) == calls
    )


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet='<>{}[]"/|:, =\\abtoolcfunpr_m\n', max_size=60), family=st.sampled_from(FAMILIES))
def test_any_text_raises_nothing(text, family):
    for mark in ("<tool_call>", "<|tool_call>call:f", "<|tool_calls_section_begin|><|tool_call_begin|>", "{", ""):
        read(family, mark + text)


def test_a_hostile_answer_costs_little_time(shared):
    import time

    start = time.process_time()
    for family in FAMILIES:
        for text in (
            "<tool_call>" * 20_000,
            "[" * 100_000,
            "<|tool_call>call:f{a:" * 5_000,
            "<function=a><parameter=b>" * 5_000,
        ):
            read(family, text)
    assert time.process_time() - start < 20


def test_a_parser_of_ones_own_needs_only_the_method_of_upstream():
    class Shouted(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            return "", [FunctionCall(json.dumps({"n": len(responses_ids)}), "shout")]

    found = asyncio.run(Shouted(None).parse([1, 2, 3]))
    assert found.calls == [FunctionCall('{"n": 3}', "shout")]


def test_ids_are_decoded_with_special_tokens_and_without_the_turns_end():
    tokenizer = tiny_tokenizer()
    hermes = ToolParser.get_tool_parser("hermes", tokenizer)
    ids = tokenizer('<tool_call>{"name": "f", "arguments": {}}</tool_call>Hi<|im_end|>')["input_ids"]
    content, calls = asyncio.run(hermes.extract_tool_calls(ids))
    assert (content, calls) == ("Hi", [FunctionCall("{}", "f")]) and hermes.stop_token_ids == []


def test_stop_tokens_are_those_that_the_tokenizer_has():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    harmony = ToolParser.get_tool_parser("gpt-oss", tokenizer)
    assert harmony.stop_token_ids == [tokenizer.convert_tokens_to_ids("<|call|>")]
