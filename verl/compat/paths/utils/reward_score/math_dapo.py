"""DAPO and AIME under upstream's import path."""

from verl.rewards.scorers.math_dapo import compute_score, normalize_final_answer

__all__ = ["compute_score", "normalize_final_answer"]
