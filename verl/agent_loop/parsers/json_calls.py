"""Families that write the arguments of a call as a JSON object: Hermes (Qwen), Llama 3, Kimi, DeepSeek V3, GPT-OSS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from verl.agent_loop.parsers.base import (
    MOST_CALLS,
    FunctionCall,
    Malformed,
    Parsed,
    ToolParser,
    json_text_of,
)
from verl.json_text import leading_json, read_json


def call_of(value: object, arguments_key: str = "arguments", identity: str | None = None) -> FunctionCall | Malformed:
    """The call in an object ``{"name": ..., "arguments": {...}}``."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return Malformed(f'it is not an object with "name" and "{arguments_key}"')
    arguments = value.get(arguments_key)
    if isinstance(arguments, str):
        return call_with(value["name"], arguments, identity)
    if not isinstance(arguments, dict):
        return Malformed(f'"{arguments_key}" is not an object')
    return FunctionCall(json_text_of(arguments), value["name"], identity)


def call_with(name: str, arguments: str, identity: str | None = None) -> FunctionCall | Malformed:
    """The call of ``name`` whose arguments are JSON text."""
    try:
        value = read_json(arguments, strict=True)
    except ValueError as error:
        return Malformed(f"its arguments are not valid JSON ({error})")
    if not isinstance(value, dict):
        return Malformed("its arguments are not a JSON object")
    return FunctionCall(json_text_of(value), name, identity)


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Qwen 2.5, Qwen 3 and Hermes: a JSON object between ``<tool_call>`` tags."""

    form = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    _start, _end = "<tool_call>", "</tool_call>"

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        if self._start not in text:
            return Parsed(text)
        items: list[FunctionCall | Malformed] = []
        content, at = [], 0
        while (start := text.find(self._start, at)) >= 0 and len(items) < MOST_CALLS:
            content.append(text[at:start])
            item, at = self._read(text, start + len(self._start))
            items.append(item)
        return Parsed("".join([*content, text[at:]]).strip(), items)

    def _read(self, text: str, at: int) -> tuple[FunctionCall | Malformed, int]:
        """The call that begins at ``at``, and where its block ends; a tag inside of a JSON string ends nothing."""
        close = text.find(self._end, at)
        try:
            value, end = leading_json(text, at)
        except ValueError as error:
            reason = f"it is not valid JSON ({error})" if close >= 0 else f"it is not closed by {self._end}"
            return Malformed(reason), close + len(self._end) if close >= 0 else len(text)
        close = text.find(self._end, end)
        if close < 0:
            return Malformed(f"it is not closed by {self._end}"), len(text)
        if text[end:close].strip():
            return Malformed("something follows its JSON object"), close + len(self._end)
        return call_of(value), close + len(self._end)


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(ToolParser):
    """Llama 3: the whole answer is an object ``{"name": ..., "parameters": {...}}``, or several with ``;`` between."""

    form = '{"name": <function-name>, "parameters": <args-json-object>}'
    stop_tokens = ("<|eom_id|>",)
    _tag = "<|python_tag|>"

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        said, tagged, rest = text.partition(self._tag)
        body = (rest if tagged else text).strip()
        content = said.strip() if tagged else ""
        if not body.startswith("{"):
            return Parsed(content, [Malformed("what follows the tag is not a JSON object")]) if tagged else Parsed(text)
        if not tagged and '"name"' not in body and '"parameters"' not in body:
            return Parsed(text)  # an answer that happens to be JSON
        return Parsed(content, [self._read(part) for part in split_objects(body)[:MOST_CALLS]])

    def _read(self, part: str) -> FunctionCall | Malformed:
        try:
            value = read_json(part, strict=True)
        except ValueError as error:
            return Malformed(f"it is not valid JSON ({error})")
        key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
        return call_of(value, key)


def split_objects(text: str) -> list[str]:
    """``{...}; {...}`` at each ``;`` outside of strings and braces; an unfinished rest is a part of its own."""
    parts, depth, start, in_string, escaped = [], 0, 0, False, False
    for at, letter in enumerate(text):
        if in_string:
            in_string = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
        elif letter == ";" and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


@ToolParser.register("kimi")
class KimiToolParser(ToolParser):
    """Kimi K2: a section of calls, each ``functions.<name>:<number>`` with JSON arguments."""

    form = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.<function-name>:<index>"
        "<|tool_call_argument_begin|><args-json-object><|tool_call_end|><|tool_calls_section_end|>"
    )
    _section, _section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    _start, _between, _end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        first = min((at for at in (text.find(self._section), text.find(self._start)) if at >= 0), default=-1)
        if first < 0:
            return Parsed(text)
        _, *blocks = text[first:].split(self._start)
        if not blocks:
            return Parsed(text[:first].strip(), [Malformed("its section holds no call")])
        return Parsed(text[:first].strip(), [self._read(block) for block in blocks[:MOST_CALLS]])

    def _read(self, block: str) -> FunctionCall | Malformed:
        inside, closed, _ = block.partition(self._end)
        identity, between, arguments = inside.partition(self._between)
        identity = identity.strip()
        if not between or not closed:
            return Malformed(f"it is not closed by {self._end}")
        name = identity.removeprefix("functions.").rpartition(":")
        function = name[0] if name[0] and name[2].isdigit() else identity.removeprefix("functions.")
        if not function:
            return Malformed("it names no function")
        return call_with(function, arguments, identity)


@ToolParser.register("deepseek_v3")
class DeepSeekV3ToolParser(ToolParser):
    """DeepSeek V3 and V3.1: calls between special tokens, name and JSON arguments apart."""

    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><function-name><｜tool▁sep｜><args-json-object>"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    _section, _start = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    _between, _end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    _fence, _fence_end = "\n```json\n", "\n```"

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        content, begun, rest = text.partition(self._section)
        if not begun:
            return Parsed(text)
        _, *blocks = rest.split(self._start)
        calls: list[FunctionCall | Malformed] = [self._read(block) for block in blocks[:MOST_CALLS]]
        return Parsed(content.strip(), calls or [Malformed("its section holds no call")])

    def _read(self, block: str) -> FunctionCall | Malformed:
        inside, closed, _ = block.partition(self._end)
        name, between, arguments = inside.partition(self._between)
        if not closed or not between:
            return Malformed(f"it is not closed by {self._end}")
        function, fenced, rest = arguments.strip().partition(self._fence)
        if name.strip() == "function" and fenced and rest.endswith(self._fence_end):  # V3: the name follows the mark
            name, arguments = function, rest.removesuffix(self._fence_end)
        if not name.strip():
            return Malformed("it names no function")
        return call_with(name.strip(), arguments)


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """GPT-OSS (the harmony format): a message on the commentary channel that is addressed to a function."""

    form = "<|channel|>commentary to=functions.<function-name> <|constrain|>json<|message|><args-json-object><|call|>"
    stop_tokens = ("<|call|>", "<|return|>")
    _message = "<|message|>"
    _ends: ClassVar[re.Pattern[str]] = re.compile(r"<\|(?:call|end|return|start)\|>")
    _recipient: ClassVar[re.Pattern[str]] = re.compile(r"to=functions\.([^\s<]+)")

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        head, *rest = text.split(self._message)
        items: list[FunctionCall | Malformed] = []
        texts = []
        for part in rest:
            end = self._ends.search(part)
            body, after = (part[: end.start()], part[end.end() :]) if end else (part, "")
            recipient = self._recipient.search(head)
            if recipient and len(items) < MOST_CALLS:
                items.append(call_with(recipient[1], body))
            elif "analysis" not in head:
                texts.append(body)
            head = after
        if self._recipient.search(head):
            items.append(Malformed(f"it ends before its {self._message}"))
        return Parsed("".join(texts).strip() if rest or items else text, items)
