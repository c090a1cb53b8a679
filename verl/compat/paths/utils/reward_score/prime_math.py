"""The grader of the Numina family under upstream's import path, with upstream's three results."""

from typing import Any

from verl.rewards.scorers import numina


def compute_score(model_output: str, ground_truth: Any) -> tuple[bool, bool, str]:
    """(whether it is right, whether an answer was found, the answer)."""
    scored = numina.compute_score(model_output, ground_truth)
    return scored["acc"], bool(scored["format"]), scored["pred"]
