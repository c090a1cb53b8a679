"""Families that write every argument in a tag of its own: Qwen3-Coder, Seed-OSS, MiniMax, DeepSeek V4, GLM.

Text stands in these tags as it is, so what else an argument is (a number, a list) is read from the tool's schema, or in
DeepSeek V4 and GLM by the call itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from verl.agent_loop.parsers.base import (
    MOST_CALLS,
    FunctionCall,
    Malformed,
    Parsed,
    ToolParser,
    argument_types,
    json_text_of,
    read_argument,
    typed,
)


class TaggedToolParser(ToolParser):
    """What these families share: a block, functions in it, parameters in these."""

    block: ClassVar[tuple[str, ...]]
    """Tags that open a block of calls."""
    block_end: ClassVar[tuple[str, ...]]
    """Tags that close it, in the same order."""
    function: ClassVar[re.Pattern[str]]
    """Opens a call; group 1 is its name."""
    function_end: ClassVar[str]
    parameter: ClassVar[re.Pattern[str]]
    """Opens an argument; groups ``name``, and where the family has it ``string`` (true or false)."""
    parameter_end: ClassVar[str]
    framed = False
    """Whether a line break stands between an argument and each of its tags."""

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        starts = [text.find(tag) for tag in self.block if tag in text]
        if not starts:
            return Parsed(text)
        first, last = min(starts), max(text.rfind(tag) for tag in self.block)
        after = max(text.rfind(end) + len(end) if end in text else 0 for end in self.block_end)
        if last > after:  # the last block is not closed
            after = len(text)
        content = (text[:first] + text[after:] if after > first else text[:first]).strip()
        body = text[first : after if after > first else len(text)]
        opened = list(self.function.finditer(body))
        ends = [match.start() for match in opened[1:]] + [len(body)]
        pairs = list(zip(opened, ends))[:MOST_CALLS]
        items = [self._read(match[1], body[match.end() : end], tools) for match, end in pairs]
        if not opened or self.function.search(text, last) is None:
            items.append(Malformed("its block holds no function"))
        return Parsed(content, items[:MOST_CALLS])

    def _read(self, name: str, body: str, tools: Sequence[Any] | None) -> FunctionCall | Malformed:
        inside, closed, _ = body.rpartition(self.function_end)
        if not closed:
            return Malformed(f"it is not closed by {self.function_end}")
        types, arguments = argument_types(tools, name), {}
        opened = self._parameters(inside)
        ends = [match.start() for match in opened[1:]] + [len(inside)]
        for match, end in zip(opened, ends):
            value, closed, _ = inside[match.end() : end].rpartition(self.parameter_end)
            if not closed:
                return Malformed(f"its argument {match['name']!r} is not closed by {self.parameter_end}")
            try:
                arguments[match["name"]] = self._value(match, value, types.get(match["name"], set()))
            except ValueError as error:
                return Malformed(f"its argument {match['name']!r} is not valid JSON ({error})")
        return FunctionCall(json_text_of(arguments), name)

    def _parameters(self, inside: str) -> list[re.Match[str]]:
        """Where arguments begin: at the first tag, and at each one that follows the end of an argument."""
        matches: list[re.Match[str]] = []
        for match in self.parameter.finditer(inside):
            at = match.start()
            while at and inside[at - 1].isspace():
                at -= 1
            if not matches or inside.endswith(self.parameter_end, 0, at):
                matches.append(match)
        return matches

    def _value(self, match: re.Match[str], text: str, types: set[str]) -> Any:
        if self.framed:
            text = text.removeprefix("\n").removesuffix("\n")
        return typed(text, types)


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(TaggedToolParser):
    """Qwen3-Coder: ``<function=...>`` and ``<parameter=...>``, each argument on lines of its own."""

    form = (
        "<tool_call>\n<function=function-name>\n<parameter=parameter-name>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    block, block_end = ("<tool_call>", "<function="), ("</tool_call>", "</function>")
    function, function_end = re.compile(r"<function=([^<>\n]+)>"), "</function>"
    parameter, parameter_end = re.compile(r"<parameter=(?P<name>[^<>\n]+)>"), "</parameter>"
    framed = True


@ToolParser.register("seed")
class SeedToolParser(TaggedToolParser):
    """Seed-OSS: as Qwen3-Coder, in blocks of its own name, without line breaks around an argument."""

    form = (
        "<seed:tool_call>\n<function=function-name>\n<parameter=parameter-name>value</parameter>\n</function>\n"
        "</seed:tool_call>"
    )
    block, block_end = ("<seed:tool_call>",), ("</seed:tool_call>",)
    function, function_end = re.compile(r"<function=([^<>\n]+)>"), "</function>"
    parameter, parameter_end = re.compile(r"<parameter=(?P<name>[^<>\n]+)>"), "</parameter>"


@ToolParser.register("minimax")
class MiniMaxToolParser(TaggedToolParser):
    """MiniMax M2: ``<invoke name="...">`` and ``<parameter name="...">``."""

    form = (
        '<minimax:tool_call>\n<invoke name="function-name">\n<parameter name="parameter-name">value</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )
    block, block_end = ("<minimax:tool_call>",), ("</minimax:tool_call>",)
    function, function_end = re.compile(r'<invoke name="([^"\n]+)">'), "</invoke>"
    parameter, parameter_end = re.compile(r'<parameter name="(?P<name>[^"\n]+)">'), "</parameter>"


@ToolParser.register("deepseek_v4")
class DeepSeekV4ToolParser(TaggedToolParser):
    """DeepSeek V4 (and V3.2, whose block has another name): every argument says whether it is text or JSON."""

    form = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="function-name">\n'
        '<｜DSML｜parameter name="parameter-name" string="true|false">value</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    block = ("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>")
    block_end = ("</｜DSML｜tool_calls>", "</｜DSML｜function_calls>")
    function, function_end = re.compile(r'<｜DSML｜invoke name="([^"\n]+)">'), "</｜DSML｜invoke>"
    parameter = re.compile(r'<｜DSML｜parameter name="(?P<name>[^"\n]+)"(?: string="(?P<string>true|false)")?>')
    parameter_end = "</｜DSML｜parameter>"

    def _value(self, match: re.Match[str], text: str, types: set[str]) -> Any:
        if match["string"] == "false":
            return read_argument(text)
        return text if match["string"] else typed(text, types)


@ToolParser.register("glm")
class GlmToolParser(ToolParser):
    """GLM 4.5: the name, then keys and values in tags; text as it is, everything else as JSON."""

    form = "<tool_call>function-name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
    _start, _end = "<tool_call>", "</tool_call>"
    _key_end: ClassVar[re.Pattern[str]] = re.compile(r"</arg_key>\s*(<arg_value>)?")
    _value_end: ClassVar[re.Pattern[str]] = re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)")
    """A value may hold the tag itself, so it ends where a key or nothing follows."""

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        said, *blocks = text.split(self._start)
        content = [said]
        items: list[FunctionCall | Malformed] = []
        for block in blocks[:MOST_CALLS]:
            inside, closed, after = block.rpartition(self._end)
            items.append(self._read(inside, tools) if closed else Malformed(f"it is not closed by {self._end}"))
            content.append(after if closed else "")
        return Parsed("".join(content).strip() if blocks else said, items)

    def _read(self, inside: str, tools: Sequence[Any] | None) -> FunctionCall | Malformed:
        name, tag, rest = inside.partition("<arg_key>")
        name, rest = name.strip(), tag + rest
        if not name:
            return Malformed("it names no function")
        types, arguments = argument_types(tools, name), {}
        for key, value in self._pairs(rest):
            if value is None:
                return Malformed("a key or a value is not closed")
            arguments[key] = self._value(value, types.get(key))
        return FunctionCall(json_text_of(arguments), name)

    def _pairs(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Keys and values in their order; a value of None ends them where one is not closed."""
        at = 0
        while at < len(text):
            key = self._key_end.search(text, at)
            value = self._value_end.search(text, key.end()) if key and key[1] else None
            if not text.startswith("<arg_key>", at) or key is None or value is None:
                yield "", None
                return
            yield text[at + len("<arg_key>") : key.start()].strip(), text[key.end() : value.start()]
            at = value.end()

    @staticmethod
    def _value(text: str, types: set[str] | None) -> Any:
        if types:
            return typed(text, types)
        try:
            return read_argument(text)
        except ValueError:
            return text
