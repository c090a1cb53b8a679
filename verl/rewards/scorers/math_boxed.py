r"""MATH [2103.03874]: the last ``\boxed{...}``, normalised as a string and compared as a string.

The rules and their order are those of the Hendrycks and Minerva evaluations, so that results are comparable. Nothing is
evaluated: symbolic equality belongs in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl.rewards.scorers.text import MENTION, RAISED, closing_brace, joins_digits, names_conflict, text_of

INTEGER_RATIO = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")
REMOVED_FIRST = ("\n", r"\!")
REPLACED = (("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
REMOVED = (r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$")
OPENING = re.compile(r"\s*\{")
WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
LONGEST_UNBRACED = 400
LONGEST_LEFT_SIDE = 2  # "x=5" and "y_=5" name a variable; a longer left side is part of the answer


def last_boxed(text: str) -> str | None:
    r"""The inside of the last ``\boxed`` (else ``\fbox``); None where there is none or its braces never close.

    ``\boxed 5`` holds the text up to ``$``. A box that is spoken of is passed over: ``\boxed{}``, ``\boxed{...}``, and
    ``\boxed`` in a sentence, which has words behind it and is not between dollar signs.
    """
    for command in (r"\boxed", r"\fbox"):
        start = len(text)
        while (start := text.rfind(command, 0, start)) >= 0:
            after = start + len(command)
            opened = OPENING.match(text, after)
            if opened and (end := closing_brace(text, opened.end())) is None:
                return None
            inside = text[opened.end() : end] if opened else _unbraced(text, start, after)
            if not MENTION.fullmatch(inside):
                return inside
    return None


def _unbraced(text: str, start: int, after: int) -> str:
    r"""What ``\boxed 5`` holds, empty where it is part of a sentence."""
    inside, closed, _ = text[after : after + LONGEST_UNBRACED].partition("$")
    is_formula = closed and text.count("$", 0, start) % 2
    return inside[1:] if inside[:1] == " " and (is_formula or not WORD.search(inside)) else ""


def normalize(text: str) -> str:
    """The canonical spelling of an answer: layout, units, signs and fraction shorthands unified.

    An answer in which that would make one number of two (``5 7``) stays as it is.
    """
    normal = _normalize(text)
    return text.strip() if joins_digits(text, normal) else normal


def _normalize(text: str) -> str:
    for piece in REMOVED_FIRST:
        text = text.replace(piece, "")
    for old, new in REPLACED:
        text = text.replace(old, new)
    for piece in REMOVED:
        text = text.replace(piece, "")
    head, _, unit = text.partition(r"\text{ ")
    if text.count(r"\text{ ") == 1 and not any(map(str.isdigit, RAISED.sub("", unit))):
        text = head
    text = text.replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= LONGEST_LEFT_SIDE:
        text = right
    text = _brace_roots(text).replace(" ", "")
    text = _brace_fractions(text)
    if text == "0.5":
        text = r"\frac{1}{2}"
    ratio = INTEGER_RATIO.fullmatch(text)
    return rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else text


def is_equiv(first: str | None, second: str | None) -> bool:
    """Whether two answers are the same after `normalize`; two missing answers are, two empty ones are not."""
    if first is None or second is None:
        return first is second
    normal = normalize(first)
    return bool(normal) and normal == normalize(second) and not names_conflict(first, second)


def compute_score(solution_str: str, ground_truth: object) -> float:
    """1.0 if the last boxed answer is the ground truth, else 0.0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and is_equiv(answer, text_of(ground_truth)))


def _brace_roots(text: str) -> str:
    r"""``\sqrt3`` -> ``\sqrt{3}``."""
    head, *rest = text.split(r"\sqrt")
    return head + "".join(r"\sqrt" + (part if part[:1] in ("{", "") else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _brace_fractions(text: str) -> str:
    r"""``\frac12`` -> ``\frac{1}{2}`` and ``\frac1{72}`` -> ``\frac{1}{72}``; a fraction that is cut off stays."""
    head, *rest = text.split(r"\frac")
    if any(len(part) < 2 and not part.startswith("{") for part in rest):
        return text
    return head + "".join(r"\frac" + _brace_fraction(part) for part in rest)


def _brace_fraction(part: str) -> str:
    if part.startswith("{"):
        return part
    top, below = part[0], part[1:]
    return f"{{{top}}}{below}" if below.startswith("{") else f"{{{top}}}{{{below[0]}}}{below[1:]}"


def compute_score_batched(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
) -> list[float]:
    """1.0 or 0.0 for each answer of a batch."""
    return [compute_score(text, truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]
