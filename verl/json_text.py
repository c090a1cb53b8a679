"""JSON from other programs and models, read with a limit on its nesting.

A model, a tool, a file or a peer chooses how deep its JSON goes. What reads, copies, renders or writes a value goes one
level of the stack down with each of its levels, so a value that could just be read would end the run later. Nothing
else in the library calls `json.loads` on text from outside (`tests/sanity/test_house_rules.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
"""A value that JSON can hold; a list or an object of any class that reads like one."""
JsonObject: TypeAlias = Mapping[str, Any]
"""An object from another program, whose values are checked where they are used."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects that is read."""
MESSAGE_DEPTH = 4 * MAX_DEPTH
"""The same for a message between our own processes, which holds such values inside others."""


def read_json(text: str | bytes | bytearray, *, strict: bool = False, depth: int = MAX_DEPTH) -> Any:
    """The value of a JSON text.

    Args:
        text: as bytes in UTF-8, UTF-16 or UTF-32.
        strict: NaN, infinities and numbers too large for a float are refused; else they are read as Python does.
        depth: deepest nesting that is read.

    Raises:
        ValueError: not JSON, nested too deeply, or an integer of more digits than Python reads.
    """
    if not isinstance(text, str):
        text = str(text, json.detect_encoding(bytes(text)), "surrogatepass")
    try:
        value = json.loads(text, **_STRICT) if strict else json.loads(text)
    except RecursionError:
        raise _too_deep(depth) from None
    if text.count("[") + text.count("{") > depth:
        check_depth(value, depth)
    return value


def without_nan(value: object) -> Any:
    """The same with null for floats that JSON has no number for: other programs refuse a line with NaN."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def object_of(value: object) -> Any:
    """The object that a text holds as JSON, else the value itself."""
    try:
        parsed = read_json(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def leading_json(text: str, at: int = 0) -> tuple[Any, int]:
    """(value, where it ends) of the strict JSON that begins at ``at``, after space; what follows may be anything.

    Raises:
        ValueError: as `read_json`; the message says after how many characters.
    """
    space = _SPACE.match(text, at)
    at = space.end() if space else at
    try:
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise _too_deep(MAX_DEPTH) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, after {error.pos - at} characters") from None
    check_depth(value)
    return value, end


def check_depth(value: object, depth: int = MAX_DEPTH) -> None:
    """Refuse a value of lists and dicts that is nested more than ``depth`` deep.

    Raises:
        ValueError: it is.
    """
    level = [value]
    for _ in range(depth):
        inner = (child for item in level for child in _children(item))
        level = [child for child in inner if isinstance(child, (list, tuple, dict))]
        if not level:
            return
    raise _too_deep(depth)


def _children(item: Any) -> Any:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, (list, tuple)) else ()


def _too_deep(depth: int) -> ValueError:
    return ValueError(f"nested more than {depth} deep")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return value


_STRICT: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite}
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(**_STRICT)
