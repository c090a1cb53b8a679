"""The built-in scorers under upstream's import path."""

from verl.rewards.dispatch import default_compute_score
