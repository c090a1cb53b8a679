"""What a request may say: parameters with a type and a range, and answers as JSON that every browser reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from verl.errors import DataError, VerlError, suggest
from verl.json_text import without_nan
from verl.serving import HttpResponse

MOST_ROWS = 500
"""Rows of a page of a table."""
LONGEST = 10_000
"""Characters of a parameter."""


Row = dict[str, Any]
"""A row of a table, or an object of an answer, as JSON has it."""


class NoSuchThing(DataError):
    """What a request names does not exist: 404."""


class Question:
    """The parameters of a request; each is read once, and one that nobody reads is refused by `end`.

    Args:
        pairs: (name, value) in their order.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]]):
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            if len(value) > LONGEST:
                raise DataError(
                    "the parameter is too long", key=name, got=f"{len(value)} characters", allowed=f"up to {LONGEST}"
                )
            self._values.setdefault(name, []).append(value)
        self._read: set[str] = set()

    def all(self, name: str) -> list[str]:
        """Every value of a parameter that may be repeated."""
        self._read.add(name)
        return self._values.get(name, [])

    def text(self, name: str, default: str = "", allowed: Sequence[str] = ()) -> str:
        """A text.

        Raises:
            DataError: it is none of those that are allowed.
        """
        value = (self.all(name) or [default])[-1]
        if allowed and value not in allowed:
            raise DataError("no such value", key=name, got=value, allowed=list(allowed), fix=suggest(value, allowed))
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A finite number; ``default`` where the parameter is absent or empty.

        Raises:
            DataError: it is none.
        """
        text = self.text(name).strip()
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError("this is no number", key=name, got=text)
        return value

    def count(self, name: str, default: int, most: int = 1 << 53) -> int:
        """An integer from 0 to ``most``.

        Raises:
            DataError: it is none.
        """
        text = self.text(name).strip() or str(default)
        if not text.isdecimal() or len(text) > 16 or int(text) > most:
            raise DataError("this is no such number", key=name, got=text, allowed=f"0 to {most}")
        return int(text)

    def flag(self, name: str) -> bool:
        """Whether it is 1."""
        return self.text(name, "0", ("0", "1", "true", "false")) in ("1", "true")

    def page(self) -> tuple[int, int]:
        """(first row, number of rows) of ``page`` and ``size``."""
        size = self.count("size", 50, MOST_ROWS)
        return self.count("page", 0) * size, size

    def end(self) -> None:
        """No parameter is left.

        Raises:
            DataError: one has no meaning here; a filter with a typing error must not show everything.
        """
        for name in self._values.keys() - self._read:
            raise DataError("no such parameter", key=name, fix=suggest(name, sorted(self._read)))


def json_answer(payload: object) -> HttpResponse:
    """JSON; NaN and infinities are null."""
    body = json.dumps(without_nan(payload), ensure_ascii=False, allow_nan=False, default=str)
    return HttpResponse(content=body.encode(errors="backslashreplace"))


def error_answer(error: VerlError) -> HttpResponse:
    """The error as the page shows it."""
    status = 404 if isinstance(error, NoSuchThing) else 400
    message = str(error).removesuffix(error.fix).strip()
    about: Row = {"message": message, "key": error.key, "fix": error.fix or None}
    return HttpResponse(content=json.dumps({"error": about}, default=str).encode(), status=status)
