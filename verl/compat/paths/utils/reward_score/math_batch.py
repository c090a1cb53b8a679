"""MATH for all answers of a batch, under upstream's import path."""

from collections.abc import Sequence
from typing import Any

from verl.rewards.scorers import math_boxed


def compute_score_batched(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[Any], extra_infos: Sequence[Any]
) -> list[float]:
    """1.0 or 0.0 for each answer."""
    return [math_boxed.compute_score(text, truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]
