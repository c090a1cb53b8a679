"""Language models that judge answers, as functions which a reward function calls with a client."""

import functools

from verl.rewards.judges.client import JudgeBudgetError, JudgeClient, JudgeError, JudgeReply, JudgeVerdictError
from verl.rewards.judges.verdicts import compare, pairwise_winrate, rubric_score

shared_client = functools.cache(JudgeClient)
"""The `JudgeClient` of these arguments in this process: who calls it shares cache, budget and places."""
__all__ = [
    "JudgeBudgetError",
    "JudgeClient",
    "JudgeError",
    "JudgeReply",
    "JudgeVerdictError",
    "compare",
    "pairwise_winrate",
    "rubric_score",
    "shared_client",
]
