r"""Geometry3K: 0.9 for the right answer and 0.1 for the form ``<think>...</think> ... \boxed{...}``.

Answers are compared as normalised strings, as tuples element by element, as exact numbers, and as formulas by
`symbolic.equal`, in a process that can be killed. An integer has to be written as one.
"""

from __future__ import annotations

import re
from fractions import Fraction

from verl.rewards.scorers.math_boxed import is_equiv
from verl.rewards.scorers.symbolic import equal
from verl.rewards.scorers.text import join_thousands, joins_digits, last_braced, names_conflict, text_of

LONGEST_ANSWER = 400
UNITS = re.compile(
    r"(?:square|degree|centimeter|cm|mm|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)"
    r"(?:es|s)?(?:\^-?[0-9]+)?(?![a-z])"
)
DROPPED = (
    "\\text",
    "\\mathrm",
    "\\left",
    "\\right",
    "^{\\circ}",
    "^\\circ",
    "\\circ",
    "°",
    "\\%",
    "%",
    "\\$",
    "$",
    "\\!",
)
WHOLE_DECIMAL = re.compile(r"(-?[0-9]{1,40})\.0*")
MIXED = re.compile(r"([0-9]{1,20}) ([0-9]{1,20})/([0-9]{1,20})")
LATEX_FRACTION = re.compile(r"(-?)\\[td]?frac\{(-?[0-9]{1,40})\}\{([0-9]{1,40})\}")
INTEGER = re.compile(r"-?[0-9]{1,40}")
RATIO = re.compile(r"-?[0-9]{1,40}/[0-9]{1,40}")
DECIMAL = re.compile(r"-?[0-9]{0,40}\.[0-9]{1,40}")


def compute_score(predict_str: str, ground_truth: object, use_boxed: bool = True, format_score: float = 0.1) -> float:
    r"""``(1 - f) * accuracy + f * format``; with ``use_boxed=False`` the whole text is the answer."""
    return (1.0 - format_score) * accuracy(predict_str, ground_truth, use_boxed) + format_score * has_format(
        predict_str
    )


def accuracy(predict_str: str, ground_truth: object, use_boxed: bool = True) -> float:
    """1.0 for the right answer, else 0.0."""
    answer = last_braced(predict_str, r"\boxed") if use_boxed else predict_str
    return float(answer is not None and same_answer(answer, text_of(ground_truth)))


def has_format(text: str) -> float:
    r"""1.0 if the text opens with a closed think element and has a box after it, else 0.0."""
    thought = text.find("</think>") if text.startswith("<think>") else -1
    boxed = text.find(r"\boxed{", thought) if thought >= 0 else -1
    return float(boxed >= 0 and text.find("}", boxed) >= 0)


def same_answer(answer: str, truth: str) -> bool:
    """Equal as strings after normalisation, as tuples or intervals of equal elements, or as numbers."""
    if max(len(answer), len(truth)) > LONGEST_ANSWER:
        return bool(answer.strip()) and answer.strip() == truth.strip()
    if is_equiv(answer, truth):
        return True
    if names_conflict(answer, truth):
        return False
    first, second = simplify(answer), simplify(truth)
    if not first or not second:
        return False
    if first == second:
        return True
    ours, theirs = _elements(first), _elements(second)
    if len(ours) == len(theirs) > 1:
        return (first[0], first[-1]) == (second[0], second[-1]) and all(map(_same_element, ours, theirs))
    return len(ours) == len(theirs) and _same_element(first, second)


def simplify(text: str) -> str:
    """Lower case, without units, signs of currency and layout; fractions as ``a/b``, ``4.0`` as ``4``.

    An answer in which that would make one number of two (``5 cm 7``) stays as it is.
    """
    text = text.strip().lower().rstrip(".")
    mixed = MIXED.fullmatch(_without_layout(text))
    if mixed and int(mixed[3]):
        return str(int(mixed[1]) + Fraction(int(mixed[2]), int(mixed[3])))
    simple = _simplify(join_thousands(text))
    return text if joins_digits(text, simple) else simple


def _without_layout(text: str) -> str:
    for piece in DROPPED:
        text = text.replace(piece, "")
    text = text.replace(" or ", ",").replace(" and ", ",")
    return UNITS.sub("", text).strip()


def _simplify(text: str) -> str:
    text = _without_layout(text).replace(" ", "")
    text = LATEX_FRACTION.sub(r"\1\2/\3", text)
    text = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    return _whole(text)


def _whole(text: str) -> str:
    decimal = WHOLE_DECIMAL.fullmatch(text)
    return decimal[1] if decimal else text


def _elements(text: str) -> list[str]:
    inside = text[1:-1] if text[0] in "([" and text[-1] in ")]" else text
    return [_whole(element) for element in inside.split(",")]


def _same_element(first: str, second: str) -> bool:
    if _same_number(first, second):
        return True
    plain = [any(form.fullmatch(text) for form in (INTEGER, RATIO, DECIMAL)) for text in (first, second)]
    integer = any(INTEGER.fullmatch(text) for text in (first, second))
    return not all(plain) and not integer and equal(first, second)


def _same_number(first: str, second: str) -> bool:
    """Equal as exact numbers. Two fractions must be written alike (2/4 is not reduced), an integer is no fraction."""
    if first == second:
        return True
    if bool(INTEGER.fullmatch(first)) != bool(INTEGER.fullmatch(second)):
        return False
    if RATIO.fullmatch(first) and RATIO.fullmatch(second):
        return False
    ours, theirs = _number(first), _number(second)
    return ours is not None and ours == theirs


def _number(text: str) -> Fraction | None:
    if INTEGER.fullmatch(text) or DECIMAL.fullmatch(text):
        return Fraction(text)
    if RATIO.fullmatch(text):
        top, _, below = text.partition("/")
        return Fraction(int(top), int(below)) if int(below) else None
    return None
