"""Whether a program answered right. Runs outside the sandbox, on text: the program never sees what is expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from verl.sandbox.limits import CallCase, StdinCase
from verl.sandbox.outcome import CaseResult, Outcome

Compare = Callable[[Any, Any], bool]
"""(what the program gave, what is expected) -> whether they are the same answer."""


def same_text(got: str, expected: str) -> bool:
    """Equal line by line, without white space at the ends of lines and without empty lines at the end."""
    return _lines(got) == _lines(expected)


def same_value(got: object, expected: Any) -> bool:
    """Equal as JSON knows values: a tuple is a list, keys are text, 1 is 1.0 but not True; floats to 1e-9 relative."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return isinstance(expected, bool) and isinstance(got, bool) and got == expected
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        return _same_number(got, expected)
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(expected, dict) and isinstance(got, dict):
        entries = {str(key): value for key, value in expected.items()}
        return got.keys() == entries.keys() and all(same_value(got[key], entries[key]) for key in entries)
    return type(got) is type(expected) and got == expected


def judge(case: StdinCase | CallCase, outcome: Outcome, compare: Compare | None = None) -> CaseResult:
    """The verdict on a case."""
    if outcome.status != "ok":
        return CaseResult(outcome.status, outcome)
    if isinstance(case, StdinCase):
        right = (compare or same_text)(outcome.stdout, case.expected)
    else:
        right = (compare or same_value)(outcome.value, case.expected)
    return CaseResult("passed" if right else "wrong", outcome)


def _same_number(got: float, expected: float) -> bool:
    if isinstance(got, int) and isinstance(expected, int):
        return got == expected
    try:
        return math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(got) and math.isnan(expected))
    except OverflowError:  # an int beyond any float, compared with a float
        return False


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
