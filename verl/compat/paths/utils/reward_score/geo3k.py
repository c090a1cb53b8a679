"""Geometry3K under upstream's import path."""

from verl.rewards.scorers.geo3k import accuracy as acc_reward
from verl.rewards.scorers.geo3k import compute_score
from verl.rewards.scorers.geo3k import has_format as format_reward
