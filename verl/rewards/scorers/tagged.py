"""Answers within ``<answer>`` tags: of multimodal Open-R1 (form and value), and the letter of an option."""

from __future__ import annotations

from verl.rewards.scorers.geo3k import same_answer
from verl.rewards.scorers.text import text_of

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def compute_score(solution_str: str, ground_truth: object, format_score: float = 0.1) -> float:
    """``(1 - f) * accuracy + f * format``; 0 where a closing tag or ``<answer>`` stands twice.

    Without tags the whole text is the answer, on either side.
    """
    if any(solution_str.count(tag) > 1 for tag in TAGS[1:]):
        return 0.0
    read = [
        text.strip() if (inside := answer(text)) is None else inside for text in (solution_str, text_of(ground_truth))
    ]
    return (1.0 - format_score) * float(same_answer(*read)) + format_score * has_format(solution_str)


def same_option(solution_str: str, ground_truth: object) -> float:
    """1.0 if both have the same text within tags, in upper or lower case; else 0.0."""
    prediction, truth = answer(solution_str), answer(text_of(ground_truth))
    return float(prediction is not None and truth is not None and prediction.upper() == truth.upper() != "")


def has_format(text: str) -> float:
    """1.0 for one thought and then one answer that ends the text; the tag that opens the thought may be missing."""
    text = text.strip()
    text = text if text.startswith(TAGS[0]) else TAGS[0] + text
    places = [text.find(tag) for tag in TAGS]
    once = all(text.count(tag) == 1 for tag in TAGS) and places == sorted(places)
    return float(once and text.endswith(TAGS[-1]))


def answer(text: str) -> str | None:
    """What stands within the first answer tags; None without them."""
    inside, closed, _ = text.partition(TAGS[2])[2].partition(TAGS[3])
    return inside.strip() if closed else None
