"""The rule reward of the quickstart: a sum is right or wrong."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None):
    """1.0 for exactly the expected number (spaces around it are forgiven), else 0.0."""
    return float(solution_str.strip() == ground_truth)
