"""Ground truths come from files as strings, numbers, numpy scalars or one-element arrays; scorers compare strings."""

from __future__ import annotations

from typing import Any


def text_of(value: Any) -> str:
    """A ground truth as the text that a model would write: ``5.0`` -> ``'5'``, ``np.int64(7)`` -> ``'7'``."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if hasattr(value, "tolist"):  # numpy scalars and arrays, tensors
        value = value.tolist()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return text_of(value[0])
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def last_braced(text: str, command: str) -> str | None:
    """The inside of the last ``command{...}`` with balanced braces, None where there is none or it never closes."""
    start = text.rfind(command + "{")
    if start < 0:
        return None
    first = start + len(command) + 1
    end = closing_brace(text, first)
    return None if end is None else text[first:end]


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one just before ``start``."""
    depth, position = 1, start
    while depth:
        closed = text.find("}", position)
        if closed < 0:
            return None
        depth += text.count("{", position, closed) - 1
        position = closed + 1
    return position - 1
