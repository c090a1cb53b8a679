"""Values as people write them become values of the declared type, or a sentence says what was expected.

YAML and shells lose types: ``1e-6`` may arrive as a text, ``3`` as a float, a single file where a list is meant. What
can only mean one thing is converted; everything else is refused.
"""

from __future__ import annotations

import copy
import math
import re
import types
import typing
from typing import Any

from verl import env
from verl.config.schema.tree import Node
from verl.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_LIST = re.compile(r"\[[^\[\]{}]*\]$")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|[+-]?inf$")


def convert(value: Any, annotation: Any) -> Any:
    """``value`` as an ``annotation``; raises TypeError if it cannot mean that."""
    if annotation is Any:
        return value
    options = _options(annotation)
    if type(None) in options:
        if value is None or value in ("None", "none", "null"):
            return None
        options = tuple(option for option in options if option is not type(None))
    exact = [option for option in options if type(value) is (typing.get_origin(option) or option)]
    for option in [*exact, *options]:
        try:
            return _one(value, option)
        except TypeError:
            continue
    raise TypeError(describe(annotation))


def describe(annotation: Any) -> str:
    """What a person may write for this type."""
    names = []
    for option in _options(annotation):
        base = typing.get_origin(option) or option
        names.append("null" if base is type(None) else _WORDS.get(base, "a mapping"))
    return " or ".join(names)


def expand_path(value: Any, key: str) -> Any:
    """``~`` and ``$VARIABLES`` in a path or a list of paths; a variable that is not set is an error."""
    if isinstance(value, list):
        return [expand_path(item, key) for item in value]
    if not isinstance(value, str):
        return value
    expanded = env.expand(value)
    missing = re.search(r"\$\{?(\w+)", expanded)
    if missing:
        raise ConfigError(
            f"the environment variable {missing[1]} is not set",
            key=key,
            got=value,
            fix="Set it, or write out the path.",
        )
    return expanded


def build(cls: type[Node], values: dict[str, Any], prefix: str = "") -> Any:
    """A node of ``cls`` from the value of every leaf below it, by dotted key; values are of the declared types."""
    made = {}
    for name, field in cls.__dataclass_fields__.items():
        key = f"{prefix}.{name}".removeprefix(".")
        inner = field.metadata.get("section")
        made[name] = copy.deepcopy(values[key]) if inner is None else build(inner, values, key)
    return cls(**made)


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _one(value: Any, annotation: Any) -> Any:
    base = typing.get_origin(annotation) or annotation
    if base is bool:
        return _bool(value)
    if base is int:
        number = _float(value)
        if not number.is_integer():
            raise TypeError
        return int(value) if isinstance(value, int | str) and str(value).lstrip("+-").isdigit() else int(number)
    if base is float:
        return _float(value)
    if base is str:
        return _str(value)
    if base is list:
        return _list(value, typing.get_args(annotation))
    if base is dict and isinstance(value, dict):
        return value
    raise TypeError


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, str | int) else ""
    if word in _YES or word == "1":
        return True
    if word in _NO or word == "0":
        return False
    raise TypeError


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    if isinstance(value, str) and not _NUMBER.match(value.strip()):
        raise TypeError
    number = float(value)
    if math.isnan(number):
        raise TypeError
    return number


def _str(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    return str(value)


def _list(value: Any, inner: tuple[Any, ...]) -> list[Any]:
    if isinstance(value, str) and _LIST.match(value):
        value = [part.strip().strip("'\"") for part in value[1:-1].split(",") if part.strip()]
    if isinstance(value, str) and value:
        value = [value]
    if not isinstance(value, list | tuple):
        raise TypeError
    return [convert(item, inner[0]) for item in value] if inner else list(value)
