"""Search question answering under upstream's import path."""

from verl.rewards.scorers.search_qa import (
    compute_score,
    compute_score_subem,
    em_check,
    extract_solution,
    normalize_answer,
    subem_check,
)
