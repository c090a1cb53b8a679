"""GSM8K under upstream's import path."""

from verl.rewards.scorers.gsm8k import compute_score, extract_solution
