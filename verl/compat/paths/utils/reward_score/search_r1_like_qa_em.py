"""Search question answering under upstream's import path."""

from typing import Any

from verl.rewards.scorers.search_qa import compute_score, compute_score_subem, extract_solution, normalize_answer


def em_check(prediction: str, golden_answers: Any) -> int:
    """1 if the prediction equals any of them."""
    return int(compute_score(f"<answer>{prediction}</answer>", golden_answers))


def subem_check(prediction: str, golden_answers: Any) -> int:
    """1 if the prediction contains any of them."""
    return int(compute_score_subem(f"<answer>{prediction}</answer>", golden_answers))
