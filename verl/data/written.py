"""Whether a chat template writes what a conversation says: every part gets a mark that the rendering has to hold.

Two renderings of one template show nothing of what both leave out, so a field that a template does not know, a role
that it skips, or thoughts that it cuts off would be lost in silence. What matters is the conversation's shape and not
its words: a template is tried once per shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from verl.data.messages import Message
from verl.data.special_tokens import ASSISTANT, random_mark
from verl.json_text import object_of

BASE = random_mark()
UNKNOWN = "unknown"
"""The field of a part that stands for a conversation which a template refuses once there are marks in it."""
CALLS = ("tool_calls", "function_call")
REASONING = ("reasoning_content", "reasoning", "thinking")
TRAINED = ("content", *CALLS, *REASONING)
"""The fields of an assistant message that hold what the model has to write."""
NAMES = ("role", "name", "tool_call_id", "id", "type", "said")
"""Fields that say who speaks or what is answered: a template may leave them out."""
TAG = re.compile(r"(<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\])")
KEEPS = re.compile(r"\b(?:preserve|keep|clear|truncate)_\w*(?:think|reason)\w*")
"""What templates call their switches for the thoughts of earlier turns."""
WAYS = {
    **dict.fromkeys(CALLS, "Write the calls into the content, as the model has to write them"),
    **dict.fromkeys(REASONING, "Write it into the content, in the form that the model has to write"),
    "tools": "Describe the tools in the system message",
    "system": "Put its text into the first user message",
}


@dataclass(frozen=True)
class MarkedPart:
    """A field of a message (None: of the tools), or the piece ``detail`` of it.

    ``earlier``: where it is lost, it is still written as long as its message is the last one.
    """

    message: int | None
    role: str
    field: str
    detail: str = ""
    earlier: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether a model that learns the answers has to write it."""
        return self.role == ASSISTANT and self.field in TRAINED

    @property
    def label(self) -> str:
        """The part for people."""
        whose = f" of {'earlier ' * self.earlier}{self.role} messages" if self.role else ""
        return f"{self.field}{whose}{f' ({self.detail})' if self.detail else ''}"

    def way_out(self, template: str) -> str:
        """What to change, given the template's text."""
        way = WAYS.get(self.field, WAYS.get(self.role, ""))
        if self.field in REASONING or self.detail.startswith("before"):
            fields = [name for name in REASONING if re.search(rf"\b{name}\b", template) and name != self.field]
            way = f"Put it into the field {fields[0]}, which the template reads" if fields else way
            switches = KEEPS.findall(template) if self.earlier else []
            way = f"Set {switches[0]} in data.apply_chat_template_kwargs" if switches else way
        rest = f"custom_chat_template in the model's section to a template that writes {self.label}."
        return f"{way}, or set {rest}" if way else f"Set {rest}"


@dataclass(frozen=True)
class Forms:
    """How a template takes what may be given in two ways.

    ``parts``: the roles whose contents it writes only as a list of parts; the others: `call_forms`.
    """

    parts: frozenset[str] = frozenset()
    text_calls: bool = False
    object_calls: bool = False

    def fitted(self, message: Message) -> Message:
        """A message in the form that the template writes; what it writes as it stands stays as it is."""
        changed = type(message)(message)
        for name in set(CALLS) & set(message):
            changed[name] = _each(message[name], lambda call, _: _changed(call, self._call))
        if message.get("role") in self.parts and isinstance(message.get("content"), str):
            changed["content"] = [{"type": "text", "text": message["content"]}]
        return changed

    def _call(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not self.text_calls:
            return {**function, "arguments": object_of(arguments)}
        if isinstance(arguments, Mapping) and self.text_calls and not self.object_calls:
            return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return function


def content_roles(write: Callable[[list[Message]], str | None]) -> frozenset[str]:
    """The roles whose contents a template writes only as lists of parts; ``write`` gives None where it refuses."""
    marks = {"user": f"{BASE}u", ASSISTANT: f"{BASE}a"}

    def lost(contents: Mapping[str, Any]) -> set[str]:
        text = write([{"role": role, "content": content} for role, content in contents.items()])
        return {role for role, mark in marks.items() if text is None or mark not in text}

    as_text = lost(marks)
    parts = {role: [{"type": "text", "text": mark}] if role in as_text else mark for role, mark in marks.items()}
    roles = as_text - lost(parts) if as_text else set()
    return frozenset(roles | {"system", "tool", "developer"} if "user" in roles else roles)


def call_forms(write: Callable[[list[Message]], str | None]) -> tuple[bool, bool]:
    """Whether a template writes arguments that are JSON text as it writes an object or writes no object; if it does."""
    key, value = f"{BASE}k", f"{BASE}v"
    as_json = json.dumps({key: value})
    texts = []
    for arguments in (as_json, {key: value}):
        call = {"id": "call00000", "type": "function", "function": {"name": "x", "arguments": arguments}}
        answer: Message = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
        texts.append(write([{"role": "user", "content": "x"}, answer]) or "")
    is_object = value in texts[1] and str({key: value}) not in texts[1]
    return as_json in texts[0] and (texts[0] == texts[1] or not is_object), is_object


def shape(messages: Sequence[Message], tools: Any) -> Hashable:
    """What of a conversation decides which parts a template writes: equal for conversations of equal form."""
    texts = [m["content"] for m in messages if m.get("role") == ASSISTANT and isinstance(m.get("content"), str)]
    return _form(messages), frozenset(map(_form, tools or ())), hash(tuple(tuple(TAG.findall(t)) for t in texts))


def _form(value: Any, depth: int = 3) -> Hashable:
    """The names and types of a record down to arguments and properties, which only are there or not; and its role."""
    if isinstance(value, Mapping) and depth:
        return tuple((name, item if name == "role" else _form(item, depth - 1)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return bool(value), tuple(_form(item, depth) for item in value if isinstance(item, Mapping))
    filled = bool(value) if isinstance(value, Mapping) else isinstance(value, str) and bool(value.strip())
    return type(value).__name__, filled


def marked(messages: Sequence[Message], tools: Any) -> tuple[list[Message], Any, dict[str, MarkedPart]]:
    """(messages and tools with a mark in every part, the part of each mark)."""
    marks: dict[str, MarkedPart] = {}

    def mark(*part: Any) -> str:
        name = f"{BASE}{len(marks):06d}"
        marks[name] = MarkedPart(*part)
        return name

    changed = [_marked_message(message, number, mark) for number, message in enumerate(messages)]
    shown = [_changed(tool, lambda f: _marked_tool(f, mark)) for tool in tools] if tools else tools
    return changed, shown, marks


def missing(text: str, marks: Mapping[str, MarkedPart]) -> list[MarkedPart]:
    """The parts of a conversation that are not in its rendering; a field of which nothing is there is one part."""
    written = set(re.findall(BASE + r"\d{6}", text))
    there = {(part.message, part.field) for mark, part in marks.items() if mark in written}
    lost = [part for mark, part in marks.items() if mark not in written]
    return list(dict.fromkeys(p if (p.message, p.field) in there else replace(p, detail="") for p in lost))


def _marked_message(message: Message, number: int, mark: Callable[..., str]) -> Message:
    role, changed = str(message.get("role")), type(message)(message)
    thoughts: dict[str, str] = {}  # two names of the reasoning: a template needs to write one of them
    for name, value in message.items():
        of_field = partial(mark, number, role, name)
        if name in CALLS:
            changed[name] = _each(value, lambda call, n: _changed(call, lambda f: _marked_call(f, n, of_field)))  # noqa: B023
        elif name == "content" and isinstance(value, list):
            filled = [part.get("type") == "text" and str(part.get("text", "")).strip() for part in value]
            pairs = zip(value, filled)
            changed[name] = [{**p, "text": _behind(p["text"], of_field())} if there else p for p, there in pairs]
        elif name in NAMES or not isinstance(value, str) or not value.strip():
            continue
        elif name in REASONING:
            thoughts[value] = thoughts.get(value) or of_field()
            changed[name] = _behind(value, thoughts[value])
        else:
            is_answer = name == "content" and role == ASSISTANT
            changed[name] = _marked_answer(value, of_field) if is_answer else _behind(value, of_field())
    return changed


def _marked_answer(text: str, mark: Callable[[str], str]) -> str:
    """A mark in each piece between two tags: thoughts stand between such."""
    pieces = TAG.split(text)
    for n in range(0, len(pieces), 2):
        if pieces[n].strip():
            pieces[n] = _behind(pieces[n], mark(f"before {pieces[n + 1]}" if n + 1 < len(pieces) else ""))
    return "".join(pieces)


def _marked_call(function: Mapping[str, Any], place: int, mark: Callable[[str], str]) -> Mapping[str, Any]:
    changed, arguments = dict(function), function.get("arguments")
    if isinstance(function.get("name"), str):
        changed["name"] = function["name"] + mark(f"the name of call {place}")
    value, detail = object_of(arguments), f"the arguments of call {place}"
    if isinstance(value, Mapping):
        filled = {k: _behind(v if isinstance(v, str) else "", mark(detail)) for k, v in value.items()}
        changed["arguments"] = json.dumps(filled) if isinstance(arguments, str) else filled
    elif isinstance(value, str) and value.strip():
        changed["arguments"] = _behind(value, mark(detail))
    return changed


def _marked_tool(function: Any, mark: Callable[..., str]) -> Any:
    changed = dict(function)
    for name in ("name", "description"):
        if isinstance(function.get(name), str) and function[name].strip():
            changed[name] = _behind(function[name], mark(None, "", "tools", f"{name}s"))
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if isinstance(properties, Mapping) and properties:
        further = {mark(None, "", "tools", "parameters"): {"type": "string", "description": "x"}}
        changed["parameters"] = {**function["parameters"], "properties": {**properties, **further}}
    return changed


def _each(calls: Any, change: Callable[[Any, int], Any]) -> Any:
    """One call or several, each changed given its number."""
    if isinstance(calls, (list, tuple)):
        return [change(call, number) for number, call in enumerate(calls, start=1)]
    return change(calls, 1)


def _changed(record: Any, change: Callable[[Any], Any]) -> Any:
    """A call or a tool with its function changed, whether that is wrapped or not; what is neither as it is."""
    function = record.get("function", record) if isinstance(record, Mapping) else None
    if not isinstance(function, Mapping):
        return record
    return {**record, "function": change(function)} if "function" in record else change(function)


def _behind(text: str, mark: str) -> str:
    """The mark behind the last word: white space at an end may be stripped."""
    words = text.rstrip()
    return f"{words}{mark}{text[len(words) :]}"
