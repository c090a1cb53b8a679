"""PRIME (Cui et al., arXiv 2502.01456)."""

from recipe.prime.rules import problems, tell
from recipe.prime.settings import ALIASES, IMPLICIT, ImplicitRewardConfig, PrimeAlgoConfig
from verl.config.loading.recipes import Recipe
from verl.registry import ScheduleFacts

FACTS = {"PrimeSchedule": ScheduleFacts(reward_model=True, one_row=True)}
RECIPE = Recipe(
    name="recipe.prime",
    settings={IMPLICIT: ImplicitRewardConfig, "algorithm": PrimeAlgoConfig},
    problems=problems,
    tell=tell,
    aliases=ALIASES,
)
