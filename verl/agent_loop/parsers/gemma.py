"""Gemma 4: a notation of its own, ``call:name{key:value}``, with a special token as the quote around text."""

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
from verl.json_text import MAX_DEPTH, Json, read_json

QUOTE = '<|"|>'


@ToolParser.register("gemma4")
class Gemma4ToolParser(ToolParser):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:42}<tool_call|>``, calls one after the other."""

    form = f"<|tool_call>call:function-name{{key:{QUOTE}text{QUOTE},other:42}}<tool_call|>"
    stop_tokens = ("<|tool_response>",)
    _start, _end = "<|tool_call>", "<tool_call|>"
    _name: ClassVar[re.Pattern[str]] = re.compile(r"\s*call:([^\s{]+)\s*(?=\{)")

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        said, *blocks = text.removesuffix("<|tool_response>").split(self._start)
        content = [said]
        items: list[FunctionCall | Malformed] = []
        for block in blocks[:MOST_CALLS]:
            inside, closed, after = block.partition(self._end)
            items.append(self._read(inside) if closed else Malformed(f"it is not closed by {self._end}"))
            content.append(after)
        return Parsed("".join(content).strip() if blocks else said, items)

    def _read(self, inside: str) -> FunctionCall | Malformed:
        name = self._name.match(inside)
        if name is None:
            return Malformed("it does not begin with call:function-name{")
        reader = Notation(inside, name.end())
        try:
            arguments = reader.value(0)
            reader.finish()
        except ValueError as error:
            return Malformed(f"its arguments cannot be read ({error})")
        return FunctionCall(json_text_of(arguments), name[1])


class Notation:
    """Reads one value of the notation.

    Args:
        text: holds it.
        at: where it begins.
    """

    _bare: ClassVar[re.Pattern[str]] = re.compile(r"[^\s,:{}\[\]<]+")
    _space: ClassVar[re.Pattern[str]] = re.compile(r"\s*")

    def __init__(self, text: str, at: int):
        self.text, self.at = text, at

    def value(self, depth: int) -> Json:
        """The value that begins here.

        Raises:
            ValueError: there is none, or it is nested too deeply.
        """
        for opened, read in (("{", self._object), ("[", self._list)):
            if self._take(opened):
                if depth >= MAX_DEPTH:
                    raise ValueError(f"nested more than {MAX_DEPTH} deep")
                return read(depth)
        if self._take(QUOTE):
            return self._quoted()
        bare = self._bare.match(self.text, self._skip())
        if bare is None:
            raise ValueError(f"a value is missing at character {self.at}")
        self.at = bare.end()
        return read_json(bare[0], strict=True)

    def finish(self) -> None:
        """Refuse what follows the value."""
        if self._skip() != len(self.text):
            raise ValueError(f"something follows at character {self.at}")

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._take("}"):
            if members:
                self._need(",")
            key = self._quoted() if self._take(QUOTE) else self._key()
            self._need(":")
            members[key] = self.value(depth + 1)
        return members

    def _list(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take("]"):
            if items:
                self._need(",")
            items.append(self.value(depth + 1))
        return items

    def _key(self) -> str:
        bare = self._bare.match(self.text, self._skip())
        if bare is None:
            raise ValueError(f"a key is missing at character {self.at}")
        self.at = bare.end()
        return bare[0].strip('"')

    def _quoted(self) -> str:
        end = self.text.find(QUOTE, self.at)
        if end < 0:
            raise ValueError("a text is not closed")
        text, self.at = self.text[self.at : end], end + len(QUOTE)
        return text

    def _take(self, mark: str) -> bool:
        is_there = self.text.startswith(mark, self._skip())
        self.at += len(mark) if is_there else 0
        return is_there

    def _need(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"{mark!r} is missing at character {self.at}")

    def _skip(self) -> int:
        space = self._space.match(self.text, self.at)
        self.at = space.end() if space else self.at
        return self.at
