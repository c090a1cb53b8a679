"""The contract of a tool-call parser: the tokens of an answer in, its text and its calls out.

Whatever a model writes is either a call, text, or a malformed call with a reason that the model receives; nothing that
it writes raises an exception. All parsers run in one event loop, so each takes time in proportion to its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from verl.json_text import MAX_DEPTH, Json, read_json
from verl.protocol.tokenizer import Tokenizer
from verl.registry import TOOL_PARSERS
from verl.tools.schemas import OpenAIFunctionToolSchema

P = TypeVar("P", bound="type[ToolParser]")
TURN_ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<seed:eos>",
    "<｜end▁of▁sentence｜>", "[EOS]", "[e~[", "<|user|>", "<|observation|>", "</s>", "<eos>",
)  # fmt: skip
"""What the families end a turn with; none of it is part of what an assistant says."""
MOST_CALLS = 1024
"""Most calls that are read out of one answer."""


@dataclass(frozen=True)
class FunctionCall:
    """A call as the model wrote it.

    Args:
        arguments: a JSON object as text.
        tool_call_id: the name that the model gave the call, in families where it does.
    """

    arguments: str
    name: str
    tool_call_id: str | None = None


@dataclass(frozen=True)
class Malformed:
    """Something that began as a call and is none; ``reason`` is meant for the model."""

    reason: str


@dataclass(frozen=True)
class Parsed:
    """An answer: its text without calls, and its calls and malformed ones in the order in which they stand."""

    content: str
    items: list[FunctionCall | Malformed] = field(default_factory=list)

    @property
    def calls(self) -> list[FunctionCall]:
        """The readable calls."""
        return [item for item in self.items if isinstance(item, FunctionCall)]


class ToolParser:
    """Reads the calls of one model family; a subclass gives `parse_text`, or overrides `extract_tool_calls`.

    Args:
        tokenizer: of the policy.

    Example:
        >>> @ToolParser.register("shouted")
        ... class Shouted(ToolParser):
        ...     def parse_text(self, text, tools=None):
        ...         return Parsed("", [FunctionCall("{}", text.strip("!"))] if text.endswith("!") else [])
    """

    form: ClassVar[str] = ""
    """How a call is written; the model receives it after a call that could not be read."""
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens that end an answer because a call is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids of `stop_tokens` that this tokenizer has."""
        vocabulary = self.tokenizer.get_vocab() if self.stop_tokens else {}
        return [int(vocabulary[token]) for token in self.stop_tokens if token in vocabulary]

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """(text, calls) of an answer.

        Args:
            responses_ids: the sampled tokens.
            tools: schemas of the tools, which say of what type an argument is where the form itself does not.
        """
        parsed = self.parse_text(self.text(responses_ids), tools)
        return parsed.content, parsed.calls

    async def parse(self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None) -> Parsed:
        """The same with malformed calls; goes through `extract_tool_calls` where a subclass overrides that alone."""
        if type(self).parse_text is ToolParser.parse_text:
            content, calls = await self.extract_tool_calls(responses_ids, tools)
            return Parsed(content, list(calls))
        return self.parse_text(self.text(responses_ids), tools)

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        """The calls in an answer's text; special tokens are still in it, the turn's end is not. Needs no tokenizer."""
        return Parsed(text)

    def text(self, ids: Sequence[int]) -> str:
        """The answer as text, with special tokens, without what ends a turn."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        ends = [end for end in (*TURN_ENDS, getattr(self.tokenizer, "eos_token", None)) if end]
        for end in ends:
            text = text.removesuffix(end)
        return text

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        """The parser of a family, or one of your own by name or dotted path."""
        return TOOL_PARSERS.get(name)(tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Put a parser under a name that ``rollout.multi_turn.format`` can use."""
        return TOOL_PARSERS.register(name)


def read_argument(text: str) -> Json:
    """The JSON value of one argument; with the object of all arguments around it, it is no deeper than JSON may be.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    return read_json(text, strict=True, depth=MAX_DEPTH - 1)


def json_text_of(value: object) -> str:
    """A value as JSON text; letters stay as they are."""
    return json.dumps(value, ensure_ascii=False)


def argument_types(tools: Sequence[Any] | None, function: str) -> dict[str, set[str]]:
    """The JSON types that the schema of ``function`` allows for each argument; {} for an unknown function."""
    for tool in tools or ():
        entry = tool.model_dump() if isinstance(tool, OpenAIFunctionToolSchema) else tool
        schema = entry.get("function", entry) if isinstance(entry, Mapping) else {}
        if schema.get("name") == function:
            properties = (schema.get("parameters") or {}).get("properties") or {}
            return {name: _types(value) for name, value in properties.items()}
    return {}


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind or ())
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name) or ():
            types |= _types(part)
    return types


WORDS = {"true": True, "false": False, "null": None, "none": None}


def typed(text: str, types: set[str]) -> Json:
    """An argument that was written without quotes, as what the schema says; text where it says nothing else."""
    others = types - {"string"}
    if not others:
        return text
    stripped = text.strip()
    value: Json = WORDS.get(stripped.lower(), stripped)
    if value is stripped:
        try:
            value = read_argument(stripped)
        except ValueError:
            return text
    return value if "string" not in types or _type_of(value) in others else text


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {
        bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
    }  # fmt: skip
    return names[type(value)]
