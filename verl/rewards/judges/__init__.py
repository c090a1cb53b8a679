"""Language models that judge answers, as functions which a reward function calls with a client."""

from verl.rewards.judges.client import JudgeBudgetError, JudgeClient, JudgeError, JudgeReply, JudgeVerdictError
from verl.rewards.judges.verdicts import compare, pairwise_winrate, rubric_score

__all__ = [
    "JudgeBudgetError",
    "JudgeClient",
    "JudgeError",
    "JudgeReply",
    "JudgeVerdictError",
    "compare",
    "pairwise_winrate",
    "rubric_score",
]
