"""Geometry3K under upstream's import path."""

from verl.rewards.scorers.geo3k import compute_score
