"""GSM8K [2110.14168]: the number after ``####``, compared as a string.

The last mark counts wherever it stands; upstream reads the last 300 characters alone. ``strict`` and ``flexible`` keep
the community's conventions, the trailing full stop included (``#### 18.`` is not ``18``), so that numbers stay
comparable; ``lenient=True`` compares values instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Literal

from verl.errors import RewardError
from verl.rewards.scorers.text import join_thousands, text_of

LONGEST_TRUTH, TAIL = 300, 4096
NUMBER = r"-?[0-9.,]+"
AFTER_HASHES = re.compile("#### (" + NUMBER + ")")
ANYWHERE = re.compile("[0-9.,]+")  # without its sign: a pattern that may begin with one is searched at half the speed
HAS_DIGIT = re.compile("[0-9]")

Method = Literal["strict", "flexible"]


def extract_solution(solution_str: str, method: Method = "strict", lenient: bool = False) -> str | None:
    """The final answer as it is written, or None.

    ``strict`` takes the last number after ``"#### "`` and drops the commas of its thousands; ``flexible`` takes the
    last number anywhere as it stands. ``lenient`` drops commas of thousands and a trailing full stop under both.
    """
    if method not in ("strict", "flexible"):
        raise RewardError(
            "unknown way to read a GSM8K answer", key="method", got=method, allowed=["strict", "flexible"]
        )
    if method == "strict":
        number = _last(AFTER_HASHES, solution_str, lambda match: match[1])
    else:
        number = _last(ANYWHERE, solution_str, lambda match: _signed(match, lenient))
    if method == "strict" or lenient:
        number = join_thousands(number).strip(",")
    return (number.rstrip(".") if lenient else number) or None


def _last(pattern: re.Pattern[str], text: str, number_of: Callable[[re.Match[str]], str]) -> str:
    """The last match that holds a number, empty where none does, looked for in longer and longer tails of a text.

    What begins a tail may be the rest of a longer match, which the next tail shows.
    """
    width = TAIL
    while True:
        start = max(0, len(text) - width)
        for match in reversed(list(pattern.finditer(text, start))):
            if (match.start() > start or not start) and (number := number_of(match)):
                return number
        if not start:
            return ""
        width *= 8


def _signed(match: re.Match[str], lenient: bool) -> str:
    """A number with its sign; empty for a full stop, or where digits are needed and there are none."""
    at = match.start()
    number = f"-{match[0]}" if at and match.string[at - 1] == "-" else match[0]
    return number if (HAS_DIGIT.search(number) if lenient else number != ".") else ""


def compute_score(
    solution_str: str,
    ground_truth: object,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    lenient: bool = False,
) -> float:
    """``score`` for the right answer, ``format_score`` for another number, 0 where no answer is found."""
    answer = extract_solution(solution_str, method, lenient)
    if answer is None:
        return 0.0
    truth = text_of(ground_truth)
    right = answer == truth or (lenient and _same_value(answer, truth))
    return score if right else format_score


def _same_value(answer: str, truth: str) -> bool:
    try:
        return Decimal(answer) == Decimal(join_thousands(truth[:LONGEST_TRUTH].strip()))
    except InvalidOperation:
        return False
