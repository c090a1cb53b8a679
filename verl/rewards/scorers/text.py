"""What scorers of text share: ground truths as texts, braces, and numbers that stay as they were written.

Ground truths come from files as strings, numbers, numpy scalars or one-element arrays; scorers compare strings.
"""

from __future__ import annotations

import re
from fractions import Fraction

SEPARATOR = r"(?P<sep>,|\{,\}|,\\!|\\,|\\ |[ ~\u00a0\u202f])"
THOUSANDS = re.compile(
    rf"(?<![0-9.,(\[])[1-9][0-9]{{0,2}}{SEPARATOR}[0-9]{{3}}(?:(?P=sep)[0-9]{{3}}){{0,12}}(?![0-9]|,[0-9]|\{{,\}}[0-9])"
)
NUMBER_RUN = re.compile(r"[0-9.]+")
NOT_DIGITS = re.compile("[^0-9]+")
LONGEST_COMPARED = 2000
WORDS = {  # units, and what is counted, that some scorer drops
    "second": "seconds?", "minute": "minutes?|mins?", "hour": "hours?|hrs?", "day": "days?", "week": "weeks?",
    "month": "months?", "year": "years?|yrs?", "mm": "millimet(?:er|re)s?|mm", "cm": "centimet(?:er|re)s?|cm",
    "metre": "met(?:er|re)s?", "km": "kilomet(?:er|re)s?|kms?", "inch": "inch(?:es)?", "foot": "foot|feet|ft",
    "yard": "yards?|yds?", "mile": "miles?", "gram": "grams?|gm", "kg": "kilograms?|kgs?", "pound": "pounds?|lbs?",
    "litre": "lit(?:er|re)s?", "dollar": "dollars?", "cent": "cents?", "percent": "percent", "degree": "degrees?",
    "point": "points?", "meal": "meals?", "edge": "edges?", "student": "students?",
}  # fmt: skip
UNIT = re.compile(
    rf"(?<![a-z\\])(?:{'|'.join(f'(?P<{name}>{words})' for name, words in WORDS.items())})(?![a-z])"
    r"|(?P<dollar_>\\\$)|(?P<percent_>%)|(?P<degree_>°|\^\s*\{?\s*\\circ)"
)
SHORT_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{\s*([a-z]{1,3})(?![a-z])")
SHORT_UNITS = {"m": "metre", "s": "second", "sec": "second", "h": "hour", "in": "inch", "g": "gram", "l": "litre"}
AREA = re.compile(r"(square|sq|cubic|cu)\b[.\s]*$")
RAISED = re.compile(r"\}?\s*\^\s*\{?\s*(-?[0-9])")
UNKNOWN = re.compile(
    r"(?<![A-Za-z0-9_}\\^)+*/.-])\s*(-?[0-9.]*(?:\\[A-Za-z]+|[A-Z]{1,4}|[A-Za-z])(?:_\{?[A-Za-z0-9]{1,4}\}?)?'*(?:\([^()=]*\))?)\s*$"
)
# What stands in a box that is mentioned and not filled in: nothing, or dots.
MENTION = re.compile(r"\s*(?:\.{2,}|…|\\[lc]?dots)?\s*")


def text_of(value: object) -> str:
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
    numbers = _numbers(before) | _numbers(join_thousands(before))
    return not all(
        len(run) == 1 or any(run in n or run.removeprefix("0") in n for n in numbers) for run in runs - numbers
    )


def _numbers(text: str) -> set[str]:
    return {run.rstrip(".") for run in NUMBER_RUN.findall(text)} - {""}


def same_integer(first: Fraction, second: Fraction) -> bool:
    """Whether a decimal is this whole number but for its rounding, within 1e-4: 99999.6 is not 100000."""
    return abs(first - second) <= Fraction(1, 10**4)


def names_conflict(first: str, second: str) -> bool:
    """Whether two answers name different units or unknowns: ``5 minutes`` and ``5 hours``, ``x=5`` and ``y=5``.

    Scorers drop both, so that an answer may leave them out. Texts that are too long to be looked at name nothing.
    """
    if first == second or max(len(first), len(second)) > LONGEST_COMPARED:
        return False
    pairs = ((names(first), names(second)) for names in (_units, _unknown))
    return any(ours and theirs and ours != theirs for ours, theirs in pairs)


def _units(text: str) -> set[tuple[str, str]]:
    """Each unit and its power: ``{("cm", "2")}`` of ``9 square centimeters``."""
    text = text.lower().replace("mph", "miles per hour")
    units = {(str(m.lastgroup).rstrip("_"), _power(text, m.start(), m.end())) for m in UNIT.finditer(text)}
    for match in SHORT_UNIT.finditer(text):
        unit = SHORT_UNITS.get(match[1], match[1])
        if unit not in ("or", "and", *(known for known, _ in units)):
            units.add((unit, _power(text, match.start(1), match.end())))
    return units


def _power(text: str, start: int, end: int) -> str:
    before = AREA.search(text, max(0, start - 12), start)
    raised = RAISED.match(text, end)
    return {"s": "2", "c": "3"}[before[1][0]] if before else raised[1] if raised else "1"


def _unknown(text: str) -> str:
    """The name in front of the last ``=``, without a difference of upper and lower case; empty where there is none."""
    left, equals, _ = text.rpartition("=")
    match = UNKNOWN.search(left[-40:]) if equals else None
    return "" if match is None else match[1].replace(" ", "").lower()


def last_braced(text: str, command: str) -> str | None:
    """The inside of the last ``command{...}`` with balanced braces, None where there is none or it never closes.

    One that is empty or holds dots alone is a mention, and the one before it counts.
    """
    start = len(text)
    while (start := text.rfind(command + "{", 0, start)) >= 0:
        first = start + len(command) + 1
        end = closing_brace(text, first)
        if end is None or not MENTION.fullmatch(text, first, end):
            return None if end is None else text[first:end]
    return None


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
