"""Representation-based exploration (Tuyls et al., arXiv 2510.11686): answers unlike the others earn a bonus."""

from dataclasses import dataclass

from verl.config import ConfigNode, PPOTrainerConfig, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.errors import ConfigError
from verl.registry import EstimatorFacts

_PARTS = {"algorithm.adv_estimator": "core:explored", "trainer.v1.trainer_mode": "schedule:RepExpSchedule"}


@dataclass(frozen=True)
class ExplorationConfig(ConfigNode):
    """The bonus."""

    rep_exp_beta: float = setting(0.01, "weight of the bonus, which is from 0 to 1, in the reward")
    rep_exp_lambda: float = setting(0.01, "regularises the covariance of a group's representations")
    rep_exp_dim: int = setting(32, "numbers of a representation after its random projection; 0: no projection")


def _problems(cfg: PPOTrainerConfig) -> Problems:
    algorithm = cfg.algorithm
    wrong = in_range("algorithm.rep_exp_beta", algorithm.rep_exp_beta, "0 or more", algorithm.rep_exp_beta >= 0)
    wrong += in_range("algorithm.rep_exp_lambda", algorithm.rep_exp_lambda, "above 0", algorithm.rep_exp_lambda > 0)
    wrong += in_range("algorithm.rep_exp_dim", algorithm.rep_exp_dim, "0 or more", algorithm.rep_exp_dim >= 0)
    present = {
        "algorithm.adv_estimator": algorithm.adv_estimator,
        "trainer.v1.trainer_mode": cfg.trainer.v1.trainer_mode,
    }
    for key, name in _PARTS.items():
        if not present[key].endswith(name.partition(":")[2]):
            message, fix = (
                "the bonus is computed by a schedule and paid by an estimator",
                f"Set it to recipe.rep_exp.{name}.",
            )
            wrong.append(ConfigError(message, key=key, got=present[key], fix=fix))
    return wrong


FACTS = {"explored": EstimatorFacts(groups=True)}
RECIPE = Recipe("recipe.rep_exp", settings={"algorithm": ExplorationConfig}, problems=_problems)
