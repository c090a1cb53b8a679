"""Programs against tests in the sandbox of this machine, under upstream's import path."""

from typing import Any

from verl.rewards.programs import code_runner
from verl.rewards.scorers import code


def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[dict[str, Any]]]:
    """(score, a list with one dict of details)."""
    scored = code.compute_score(completion, test_cases, code_runner(), continuous)
    return scored["score"], [scored]
