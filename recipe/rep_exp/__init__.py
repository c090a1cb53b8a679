"""Representation-based exploration (Tuyls et al., arXiv 2510.11686): answers unlike the others earn a bonus."""

from dataclasses import dataclass

from recipe.parts import without_part
from verl.config import ConfigNode, PPOTrainerConfig, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.registry import EstimatorFacts, ScheduleFacts


@dataclass(frozen=True)
class ExplorationConfig(ConfigNode):
    """The bonus."""

    rep_exp_beta: float = setting(0.01, "weight of the bonus, which is from 0 to 1, in the reward")
    rep_exp_lambda: float = setting(0.01, "regularises the covariance of a group's representations")
    rep_exp_dim: int = setting(32, "numbers of a representation after its random projection; 0: no projection")


def _problems(cfg: PPOTrainerConfig) -> Problems:
    algorithm = cfg.algorithm
    problems = in_range("algorithm.rep_exp_beta", algorithm.rep_exp_beta, "0 or more", algorithm.rep_exp_beta >= 0)
    problems += in_range("algorithm.rep_exp_lambda", algorithm.rep_exp_lambda, "above 0", algorithm.rep_exp_lambda > 0)
    problems += in_range("algorithm.rep_exp_dim", algorithm.rep_exp_dim, "0 or more", algorithm.rep_exp_dim >= 0)
    why, mode = "the bonus is computed by a schedule and paid by an estimator", cfg.trainer.v1.trainer_mode
    problems += without_part("algorithm.adv_estimator", algorithm.adv_estimator, why, "recipe.rep_exp.core:explored")
    return problems + without_part("trainer.v1.trainer_mode", mode, why, "recipe.rep_exp.schedule:RepExpSchedule")


FACTS = {"explored": EstimatorFacts(groups=True), "RepExpSchedule": ScheduleFacts(one_row=True)}
RECIPE = Recipe("recipe.rep_exp", settings={"algorithm": ExplorationConfig}, problems=_problems)
