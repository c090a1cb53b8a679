"""PRIME (Cui et al., arXiv 2502.01456)."""

from recipe.prime.rules import problems, tell
from recipe.prime.settings import ALIASES, IMPLICIT, ImplicitRewardConfig, PrimeAlgoConfig
from verl.config.recipes import Recipe
from verl.registry import EstimatorFacts, ScheduleFacts

_OF_PROCESS = EstimatorFacts(settings=("reward_dpo_coef", "reward_gt_coef"))
FACTS = {
    "PrimeSchedule": ScheduleFacts(reward_model=True),
    "leave_one_out": _OF_PROCESS,
    "leave_one_out_compat": _OF_PROCESS,
}
RECIPE = Recipe(
    name="recipe.prime",
    settings={IMPLICIT: ImplicitRewardConfig, "algorithm": PrimeAlgoConfig},
    problems=problems,
    tell=tell,
    aliases=ALIASES,
)
