"""The reward of the tasks of ``make_data.py``: 1 for exactly the answer, else 0."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.strip() == ground_truth)
