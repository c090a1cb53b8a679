"""Search question answering [2503.09516]: the text in the last ``<answer>`` element, compared by SQuAD's rules."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.text import join_thousands, text_of

OPEN, CLOSE = "<answer>", "</answer>"
MOST_TAGS = 10
PENALTY_FOR_MANY_TAGS = 4
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
MINUS = re.compile(r"(?<!\w)[-−](?=\.?[0-9])")
DECIMAL_POINT = re.compile(r"(?<=[0-9])\.(?=[0-9])")
KEPT, KEPT_MINUS = "\ue000", "\ue001"  # private use: stand for a point and a minus while punctuation is removed
BETWEEN_DIGITS = re.compile(rf"(?<=[0-9])[{re.escape(string.punctuation)}]+(?=[0-9])")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_solution(solution_str: str) -> str | None:
    """The trimmed content of the last closed answer element of the response that has any, or None."""
    end = start = 0
    answer = None
    while (start := solution_str.find(OPEN, end)) >= 0:
        start += len(OPEN)
        end = solution_str.find(CLOSE, start)
        if end < 0:
            break
        answer = solution_str[start:end].strip() or answer  # an empty one is a mention of the tags
        end += len(CLOSE)
    return answer


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, single spaces; ``2,3`` as ``2 3``.

    A decimal point stays, and the minus sign of a number: ``-5``, but ``covid 19`` and ``2010 2015``.
    """
    signed = MINUS.sub(KEPT_MINUS, join_thousands(text))
    spaced = BETWEEN_DIGITS.sub(" ", DECIMAL_POINT.sub(KEPT, signed))
    bare = " ".join(ARTICLES.sub(" ", spaced.lower().translate(NO_PUNCTUATION)).split())
    return bare.replace(KEPT, ".").replace(KEPT_MINUS, "-")


def compute_score(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` if the answer equals any gold answer, else ``format_score``; 0 where there is no answer.

    ``ground_truth`` is ``{"target": text or list of texts}``, or the text or list itself. A right answer among more
    than ten opening or closing tags gets a quarter. ``method`` is there for callers of the upstream signature; it has
    no effect, as it has none there.
    """
    return _score(solution_str, ground_truth, format_score, score, lambda gold, answer: gold == answer)


def compute_score_subem(
    solution_str: str, ground_truth: object, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """As `compute_score`, but a gold answer that is contained in the answer counts."""
    return _score(solution_str, ground_truth, format_score, score, _contains)


def _contains(gold: str, answer: str) -> bool:
    """Whether the answer has the gold text in it, and not as a part of a longer number: 5 is not in -5 or 15."""
    before = r"(?<![-.0-9])" if gold[0].isdigit() else ""
    after = r"(?![0-9]|\.[0-9])" if gold[-1].isdigit() else ""
    return re.search(before + re.escape(gold) + after, answer) is not None


def em_check(prediction: str, golden_answers: object) -> int:
    """1 if the prediction equals any of them."""
    return int(compute_score(f"{OPEN}{prediction}{CLOSE}", golden_answers))


def subem_check(prediction: str, golden_answers: object) -> int:
    """1 if the prediction contains any of them."""
    return int(compute_score_subem(f"{OPEN}{prediction}{CLOSE}", golden_answers))


def _score(solution_str: str, ground_truth: Any, format_score: float, score: float, matches: Any) -> float:
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    prediction = normalize_answer(answer)
    golds = filter(None, map(normalize_answer, gold_answers(ground_truth)))
    if not prediction or not any(matches(gold, prediction) for gold in golds):
        return format_score
    crowded = max(solution_str.count(OPEN), solution_str.count(CLOSE)) > MOST_TAGS
    return score / PENALTY_FOR_MANY_TAGS if crowded else score


def gold_answers(ground_truth: object) -> list[str]:
    """The gold answers as texts, whatever the file made of them (a struct, a list, an array, a string)."""
    target = ground_truth.get("target", ()) if isinstance(ground_truth, Mapping) else ground_truth
    if hasattr(target, "tolist"):
        target = target.tolist()
    if target is None:
        return []
    return [text_of(gold) for gold in target] if isinstance(target, (list, tuple)) else [text_of(target)]
