r"""NuminaMath and other competition mathematics: the final answer of a solution, compared by the rules of PRM800K.

After the grader of Lightman et al. 2023 [2305.20050]: as normalised texts, then element by element, formulas by
`symbolic.equal` in a process that can be killed, and decimals within 1e-4 of each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verl.rewards.scorers.geo3k import simplify
from verl.rewards.scorers.math_boxed import is_equiv, last_boxed
from verl.rewards.scorers.symbolic import equal
from verl.rewards.scorers.text import join_thousands, joins_digits, names_conflict, same_integer, text_of

WINDOW = 4000  # characters on either side of the words that announce an answer
LONGEST_ANSWER = 400
MOST_ELEMENTS = 24
RELATIVE = Fraction(1, 10_000)
INTRODUCTIONS = ("answer:", "answer is", "answers are")
CONCLUSION = "is the answer"
CONNECTIVE = re.compile(r"(?:so|thus|hence|then|therefore),?\s+", re.IGNORECASE)
LINKS = ("be ", "is ", "are ", "=", ": ", "get ")
NUMBER = re.compile(r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})")
RATIO = re.compile(r"(-?[0-9]{1,40})/(-?[0-9]{1,40})")
WHOLE = re.compile(r"-?[0-9]{1,40}")
MIXED = re.compile(
    r"(-?)([0-9]{1,20})\s*(?:\\[td]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}|\s([0-9]{1,20})/([0-9]{1,20}))"
)
LARGE = {"million": 6, "billion": 9, "trillion": 12}
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
PI = re.compile(r"\\pi(?![a-z])|π")
SHORT_SIDE = 2  # "x=5" names a variable

Equal = Callable[[str, str], bool]


def extract_answer(solution_str: str) -> tuple[bool, str]:
    r"""Whether an answer was found, and its text.

    The inside of the last ``\boxed{}``; else what follows the last "answer is" (or stands before "is the answer"), its
    first sentence, from its last "is", "=" or the like. Without a box the answer has to hold a digit to count as found.
    """
    boxed = last_boxed(solution_str)
    if boxed is not None:
        return True, boxed.strip()
    low = solution_str.lower()
    if len(low) != len(solution_str):  # a few letters change their length
        low = solution_str
    places = [(low.rfind(words), len(words)) for words in INTRODUCTIONS]
    start, length = max(places)
    if start >= 0:
        text = solution_str[start + length :][:WINDOW]
    else:
        end = low.rfind(CONCLUSION) if CONCLUSION in low else len(low)
        text = solution_str[:end][-WINDOW:].strip().rpartition("\n")[2]
    text = text.strip().partition("\n")[0].partition(". ")[0]
    after = max(text.rfind(link) + len(link) if link in text else 0 for link in LINKS)
    text = CONNECTIVE.sub("", text[after:].strip(), count=1).rstrip(".").strip("$ ")
    return any(sign.isdigit() for sign in text), text


def compute_score(solution_str: str, ground_truth: object) -> dict[str, Any]:
    """``{"score": 1.0 or 0.0, "acc": bool, "pred": str, "format": whether an answer was found}``."""
    is_marked, answer = extract_answer(solution_str)
    right = same_answer(answer, text_of(ground_truth))
    return {"score": float(right), "acc": right, "pred": answer[:LONGEST_ANSWER], "format": float(is_marked or right)}


def same_answer(answer: str, truth: str, same_formula: Equal = equal) -> bool:
    """Equal as texts after normalisation, as tuples, intervals or matrices of equal elements, or as equations."""
    if not answer.strip() or not truth.strip() or max(len(answer), len(truth)) > LONGEST_ANSWER:
        return bool(answer.strip()) and answer.strip() == truth.strip()
    if names_conflict(answer, truth):
        return False
    if is_equiv(answer, truth) or _close(answer, truth, same_formula):
        return True
    first, second = normalize(answer), normalize(truth)
    if not first or not second:
        return False
    if first == second:
        return True
    matrices = _matrix(first), _matrix(second)
    if all(matrices):
        return _same_matrix(*matrices, same_formula)
    ours, theirs = elements(first), elements(second)
    if len(ours) != len(theirs) or len(ours) > MOST_ELEMENTS:
        return False
    if len(ours) > 1 or _bracketed(first) or _bracketed(second):
        if (first[0], first[-1]) != (second[0], second[-1]) and (_bracketed(first) or _bracketed(second)):
            return False
        return all(_same_element(a, b, same_formula) for a, b in zip(ours, theirs))
    return _same_element(ours[0], theirs[0], same_formula)


def normalize(text: str) -> str:
    """Without units, currency, thousands commas and layout; ``7 3/4`` as ``7+3/4``, ``2 million`` as ``2*10^6``."""
    mixed = MIXED.fullmatch(text.strip().strip("$").strip())
    if mixed:
        top, below = (mixed[3], mixed[4]) if mixed[3] else (mixed[5], mixed[6])
        text = f"{mixed[1]}({mixed[2]}+{top}/{below})"
    for word, power in LARGE.items():
        text = re.sub(rf"(?<=[0-9])\s*{word}\b", f"*10^{power}", text)
    matrix = MATRIX.search(text)
    if matrix:
        narrow = text.replace(" ", "")
        return text if joins_digits(text, narrow) else narrow
    text = simplify(text.replace("\\{", "{").replace("\\}", "}"))
    left, _, right = text.partition("=")
    named = text.count("=") == 1 and len(left) <= SHORT_SIDE and left[:1].isalpha()
    return right if named else text


def elements(text: str) -> list[str]:
    """The elements of a tuple, interval or list; a comma inside further brackets separates nothing."""
    inside = text[1:-1] if _bracketed(text) else text
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(inside):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append(inside[start:place])
            start = place + 1
    return [*parts, inside[start:]]


def _bracketed(text: str) -> bool:
    """Whether the first sign is a bracket that the last one closes, around more than one element."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return False
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([") - (sign in ")]")
        if depth == 0:
            return place == len(text) - 1 and "," in text
    return False


def _same_element(first: str, second: str, same_formula: Equal) -> bool:
    first, second = first.strip(), second.strip()
    if not first or not second:
        return False
    if first == second:
        return True
    if RATIO.fullmatch(first) and RATIO.fullmatch(second):
        return False  # 2/4 is not reduced
    if bool(WHOLE.fullmatch(first)) != bool(WHOLE.fullmatch(second)) and _plain(first) and _plain(second):
        return False
    if first.count("=") == 1 and second.count("=") == 1:
        a, b = (f"{left}-({right})" for left, _, right in (first.partition("="), second.partition("=")))
        return same_formula(a, b) or same_formula(a, f"-({b})")
    return "=" not in first + second and same_formula(first, second)


def _plain(text: str) -> bool:
    return bool(NUMBER.fullmatch(text) or RATIO.fullmatch(text))


def _close(answer: str, truth: str, same_formula: Equal) -> bool:
    """Two decimals within 1e-4, 50 % as 50 and as 0.5 but never as 5000, and multiples of pi with pi as 3.14."""
    ours, theirs = _number(answer), _number(truth)
    if ours is not None and theirs is not None:
        percent = ("%" in answer) - ("%" in truth)  # 1: the answer's share of a hundred, -1: the truth's
        return _near(ours, theirs) or (percent != 0 and _near(ours, theirs * Fraction(100) ** percent))
    if bool(PI.search(answer)) == bool(PI.search(truth)) or (ours is None and theirs is None):
        return False
    written = simplify(PI.sub("*3.14", answer if theirs is not None else truth)).removeprefix("*")
    return same_formula(written, str(theirs if theirs is not None else ours))


def _near(ours: Fraction, theirs: Fraction) -> bool:
    """Within 1e-4 of each other; where one is whole, the other one means the same whole number."""
    has_integer = ours.denominator == 1 or theirs.denominator == 1
    return abs(ours - theirs) <= RELATIVE * abs(theirs) and (not has_integer or same_integer(ours, theirs))


def _number(text: str) -> Fraction | None:
    text = join_thousands(text.strip().strip("$"))
    bare = text.replace("\\%", "").replace("%", "").replace("\\$", "").strip()
    return Fraction(bare) if NUMBER.fullmatch(bare) and not joins_digits(text, bare) else None


def _matrix(text: str) -> list[list[str]]:
    match = MATRIX.search(text)
    return [row.split("&") for row in match[2].split("\\\\") if row.strip()] if match else []


def _same_matrix(first: list[list[str]], second: list[list[str]], same_formula: Equal) -> bool:
    if [len(row) for row in first] != [len(row) for row in second] or sum(map(len, first)) > MOST_ELEMENTS:
        return False
    pairs = ((a, b) for ours, theirs in zip(first, second) for a, b in zip(ours, theirs))
    return all(_same_element(simplify(a), simplify(b), same_formula) for a, b in pairs)


def compute_verdict(model_output: str, ground_truth: object) -> tuple[bool, bool, str]:
    """(whether it is right, whether an answer was found, the answer)."""
    scored = compute_score(model_output, ground_truth)
    return scored["acc"], bool(scored["format"]), scored["pred"]
