"""Geometry3K under upstream's import path."""

from typing import Any

from verl.rewards.scorers.geo3k import compute_score
from verl.rewards.scorers.geo3k import has_format as format_reward


def acc_reward(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    """1.0 or 0.0, whatever the form."""
    return compute_score(predict_str, ground_truth, use_boxed, format_score=0.0)
