"""The package math-verify as a scorer, under upstream's import path."""

from typing import Any

from verl.rewards.scorers import math_verify


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """1.0 if the two are equal, else 0.0; ``timeout_score`` where that is not decided in time."""
    return math_verify.compute_score(model_output, ground_truth, timeout_score)
