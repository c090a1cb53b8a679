"""Multimodal Open-R1 under upstream's import path."""

from verl.rewards.scorers.tagged import compute_score
from verl.rewards.scorers.tagged import has_format as format_reward
