"""A typed Python function as a tool: its schema is read off the signature and a Google-style docstring."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from verl.errors import ConfigError
from verl.registry import load_module
from verl.tools.base import BaseTool, Executed
from verl.tools.runner import in_thread
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
OBJECTS = (dict, Mapping)
LISTS = (list, tuple, set, frozenset)
NOTHING = "(the tool returned nothing)"


class FunctionTool(BaseTool):
    """A function as a tool.

    What it returns becomes the answer: text as it is, a `ToolResponse` or (answer, reward, metrics) too, anything else
    as JSON. A plain function runs in a thread. The object itself can still be called as the function.

    Args:
        name: what the model calls.
        fn: a function, or a coroutine function.
        tool_schema: what the model is shown.
        is_async: whether ``fn`` is a coroutine function.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any],
        is_async: bool = False,
    ):
        super().__init__({}, tool_schema)
        self.name, self.fn, self.is_async = name, fn, is_async

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        inspect.signature(self.fn).bind(**parameters)  # a wrong argument is an error before anything runs
        value = await (self.fn(**parameters) if self.is_async else in_thread(self.fn, **parameters))
        if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], ToolResponse | str):
            answer, reward, metrics = value
            return answer if isinstance(answer, ToolResponse) else ToolResponse(text=answer), reward, metrics
        return value if isinstance(value, ToolResponse) else ToolResponse(text=_text(value)), None, {}


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Name -> the tool that was decorated last under it in this process; a run takes those of the file that it names."""


def function_tool(
    name: str | Callable[..., Any] | None = None, schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
) -> Any:
    """Decorator: the function becomes a `FunctionTool`.

    Args:
        name: what the model calls; the function's name if not given. The decorator works without parentheses too.
        schema: what the model is shown; read off the function if not given.

    Raises:
        ConfigError: a parameter without a type, or of one that JSON cannot say; ``*args`` or ``**kwargs``.

    Example:
        >>> @function_tool()
        ... def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first.
        ...         b: the second.
        ...     '''
        ...     return a + b
    """
    if callable(name):
        return function_tool()(name)

    def wrap(fn: Callable[..., Any]) -> FunctionTool:
        called = name or fn.__name__
        shown = schema if schema is not None else function_schema(fn, called)
        tool = FUNCTION_TOOL_REGISTRY[called] = FunctionTool(called, fn, shown, inspect.iscoroutinefunction(fn))
        return tool

    return wrap


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Every `FunctionTool` of a Python file, in its order."""
    return [thing for thing in vars(load_module(path)).values() if isinstance(thing, FunctionTool)]


def function_schema(fn: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    """The schema of a typed function with a Google-style docstring."""
    summary, texts = read_docstring(inspect.getdoc(fn) or "")
    hints = typing.get_type_hints(fn)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(fn).parameters.values():
        key = f"{name}.{parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError("a function tool takes named parameters only", key=key)
        if parameter.name not in hints:
            raise ConfigError("a parameter of a function tool needs a type", key=key)
        property_schema = json_type(hints[parameter.name], key)
        if parameter.name in texts:
            property_schema["description"] = texts[parameter.name]
        properties[parameter.name] = property_schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    function = {
        "name": name,
        "description": summary,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def json_type(hint: object, key: str) -> dict[str, Any]:
    """The JSON schema of a type hint.

    Raises:
        ConfigError: JSON has no such type.
    """
    if hint is Any:
        return {}
    if hint in NAMES:
        return {"type": NAMES[hint]}
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Annotated:
        return json_type(arguments[0], key)
    if origin is Literal:
        kinds = {NAMES[type(value)] for value in arguments}
        return {"type": kinds.pop() if len(kinds) == 1 else sorted(kinds), "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        parts = [json_type(part, key) for part in arguments if part is not type(None)]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}
    if origin in LISTS or origin is typing.get_origin(typing.Sequence[int]):
        return {"type": "array", "items": json_type(arguments[0], key)} if arguments else {"type": "array"}
    if origin in OBJECTS or origin is typing.get_origin(Mapping[str, int]):
        return {"type": "object"}
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return {"type": "string", "enum": [member.value for member in hint]}
    raise ConfigError(
        "a type that JSON cannot say", key=key, got=hint, allowed="str, int, float, bool, list, dict, ..."
    )


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ENTRY = re.compile(r"^(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what stands before the first section, text of each argument) of a Google-style docstring."""
    summary: list[str] = []
    texts: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        heading = _SECTION.match(line.strip())
        if heading and not line.startswith(" "):
            section, indent = heading[1], 0
        elif not section:
            summary.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.match(line.strip()) if depth <= indent else None
            if entry:
                current = entry[1]
                texts[current] = entry[2]
            elif current:
                texts[current] = f"{texts[current]} {line.strip()}".strip()
    return re.sub(r"\s+", " ", " ".join(summary)).strip(), texts


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return NOTHING if value is None else json.dumps(value, ensure_ascii=False)
