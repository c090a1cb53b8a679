"""What scorers of text share: ground truths as texts, braces, and numbers that stay as they were written.

Ground truths come from files as strings, numbers, numpy scalars or one-element arrays; scorers compare strings.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

SEPARATOR = r"(?P<sep>,|\{,\}|,\\!|\\,|\\ |[ ~\u00a0\u202f])"
THOUSANDS = re.compile(
    rf"(?<![0-9.,(\[])[1-9][0-9]{{0,2}}{SEPARATOR}[0-9]{{3}}(?:(?P=sep)[0-9]{{3}}){{0,12}}(?![0-9]|,[0-9]|\{{,\}}[0-9])"
)
NUMBER_RUN = re.compile(r"[0-9.]+")
NOT_DIGITS = re.compile("[^0-9]+")
LONGEST_COMPARED = 2000


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


def join_thousands(text: str) -> str:
    r"""``1,000`` and ``1\,000`` as ``1000``; commas and blanks that do not set off thousands stay (``2,3``, ``1,00``).

    Behind an opening bracket they separate coordinates: ``(1,234)`` stays.
    """
    return THOUSANDS.sub(lambda match: NOT_DIGITS.sub("", match[0]), text)


def joins_digits(before: str, after: str) -> bool:
    """Whether a normalisation made one number of two: ``5 7``, ``5 cm 7`` or ``5{,}7`` became ``57``.

    So it is of texts that are too long to be looked at.
    """
    runs = _numbers(after)
    if all(len(run) == 1 for run in runs):
        return False
    if len(before) > LONGEST_COMPARED:
        return True
    known = _numbers(before) | _numbers(join_thousands(before))
    return not all(
        len(run) == 1 or any(run in one or run.removeprefix("0") in one for one in known) for run in runs - known
    )


def _numbers(text: str) -> set[str]:
    return {run.rstrip(".") for run in NUMBER_RUN.findall(text)} - {""}


def same_integer(first: Fraction, second: Fraction) -> bool:
    """Whether a decimal means this whole number and no other: less than a half away."""
    return abs(first - second) < Fraction(1, 2)


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
