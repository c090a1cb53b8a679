"""MATH for all answers of a batch, under upstream's import path."""

from verl.rewards.scorers.math_boxed import compute_score_batched
