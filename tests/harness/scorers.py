"""The code of reward functions, for runs that read one from a file."""

from __future__ import annotations


def scorer(result: str) -> str:
    """A file whose function returns this expression.

    Example:
        >>> print(scorer("0.5"), end="")
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return 0.5
    """
    return f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {result}\n"


LETTERS = scorer("len(set(solution_str)) / 10")
"""How many characters an answer has that differ, so that few answers score alike."""
