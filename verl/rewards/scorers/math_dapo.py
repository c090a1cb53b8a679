r"""DAPO and AIME [2503.14476]: the last ``Answer: ...``, normalised by the rules of [2206.14858 D].

Upstream reads the last 300 characters alone; here the last line counts wherever it stands.

A wrong answer scores -1, not 0, and the result separates ``acc`` from ``score``, because the overlong penalty is
added to the score while groups are filtered by accuracy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl.rewards.scorers.text import join_thousands, joins_digits, last_braced, names_conflict, text_of

LONGEST_ANSWER = 300
NO_ANSWER = "[INVALID]"
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
# The order matters: "cm" and "gm" go before "meters", "\text{s}" before the empty "\text{}".
DELETED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
DOLLAR_PAIR = re.compile(r".*?\$(.*?)\$.*")
UNWRAPPED = tuple(re.compile(rf"\\{name}\{{(.*?)\}}") for name in ("text", "textbf", "overline"))
BOXED = re.compile(r"\\boxed\{(.*)\}")
BARE_FRACTION = re.compile(r"frac([^{])(.)")
BARE_ROOT = re.compile(r"sqrt([^{])")


def normalize_final_answer(answer: str) -> str:
    """One spelling for an answer: units, words, LaTeX wrappers and thousands commas removed.

    Only the last 300 characters of the answer count, so that the patterns are bounded. An answer in which that
    would make one number of two (``2,3``, ``5 7``) stays as it is.
    """
    text = answer[-LONGEST_ANSWER:].rpartition("=")[2]
    normal = _normalize(join_thousands(text))
    return text.strip() if joins_digits(text, normal) else normal


def _normalize(text: str) -> str:
    for old, new in SUBSTITUTIONS:
        text = text.replace(old, new)
    for piece in DELETED:
        text = text.replace(piece, "")
    text = DOLLAR_PAIR.sub(r"\1", text)
    for wrapper in UNWRAPPED:
        text = wrapper.sub(r"\1", text)
    text = BOXED.sub(r"\1", text)
    text = BARE_FRACTION.sub(r"frac{\1}{\2}", text)
    return BARE_ROOT.sub(r"sqrt{\1}", text).replace("$", "").strip()


def compute_score(
    solution_str: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    r"""``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``.

    Args:
        strict_box_verify: take the last ``\boxed{...}`` and compare it as it stands; upstream looks for it in the last
            100 characters.
        pause_tokens_index: is there for callers of the upstream signature, whose window it moves; it has no effect.
    """
    truth = text_of(ground_truth)
    if strict_box_verify:
        boxed = last_braced(solution_str, r"\boxed")
        pred, right = (NO_ANSWER, False) if boxed is None else (boxed, bool(boxed.strip()) and boxed == truth)
    else:
        answers = ANSWER_LINE.findall(solution_str)
        pred = normalize_final_answer(answers[-1]) if answers else NO_ANSWER
        right = bool(pred) and pred == normalize_final_answer(truth) and not names_conflict(answers[-1], truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
