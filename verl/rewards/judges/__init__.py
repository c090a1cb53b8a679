"""Language models that judge answers, as functions which a reward function calls with a client."""

from verl.rewards.judges.client import (
    JudgeBudgetError,
    JudgeClient,
    JudgeError,
    JudgeReply,
    JudgeVerdictError,
    shared_client,
)
from verl.rewards.judges.verdicts import compare, fenced, pairwise_winrate, rubric_score, tag_of

__all__ = [
    "JudgeBudgetError",
    "JudgeClient",
    "JudgeError",
    "JudgeReply",
    "JudgeVerdictError",
    "compare",
    "fenced",
    "pairwise_winrate",
    "rubric_score",
    "shared_client",
    "tag_of",
]
