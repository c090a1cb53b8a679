"""SPO, single-stream policy optimization (Xu and Ding, arXiv 2509.13232): one answer and a value per prompt."""

from dataclasses import dataclass

from verl.config import ConfigNode, PPOTrainerConfig, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.errors import ConfigError


@dataclass(frozen=True)
class ValueConfig(ConfigNode):
    """The values of prompts."""

    spo_rho: float = setting(0.9, "share of a prompt's earlier outcomes that an answer leaves; window: 1 / (1 - rho)")
    spo_floor: float = setting(0.05, "added to every prompt's weight sqrt(v (1 - v)) in the draw")


def _problems(cfg: PPOTrainerConfig) -> Problems:
    data = cfg.data
    problems = in_range("data.spo_rho", data.spo_rho, "0 or more, and below 1", 0 <= data.spo_rho < 1)
    problems += in_range("data.spo_floor", data.spo_floor, "above 0", data.spo_floor > 0)
    needed = {"data.custom_cls.path": data.custom_cls.path, "data.sampler.class_path": data.sampler.class_path}
    for key in (key for key, path in needed.items() if path is None):
        message, fix = "SPO reads and updates the values of prompts", "python -m recipe.spo.main_spo sets it."
        problems.append(ConfigError(message, key=key, got=None, fix=fix))
    return problems


RECIPE = Recipe("recipe.spo", settings={"data": ValueConfig}, problems=_problems)
