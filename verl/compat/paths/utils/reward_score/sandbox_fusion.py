"""Programs against tests at a service, under upstream's import path."""

from typing import Any

from verl.rewards.programs import code_runner
from verl.rewards.scorers import code


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int,
    completion: str,
    test_cases: str | dict[str, Any],
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """(score, a list with one dict of details); ``timeout`` seconds for each test."""
    runner = code_runner(sandbox_fusion_url, 64, memory_limit_mb, concurrent_semaphore)
    scored = code.compute_score(completion, test_cases, runner, continuous, timeout)
    return scored["score"], [scored]
