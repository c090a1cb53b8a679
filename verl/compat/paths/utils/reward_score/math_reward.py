"""MATH under upstream's import path."""

from verl.rewards.scorers.math_boxed import compute_score, is_equiv

__all__ = ["compute_score", "is_equiv"]
