"""SPIN (Chen et al., arXiv 2401.01335), in its online form: the better of two own answers wins."""

from dataclasses import dataclass
from typing import Any

from verl.config import ConfigNode, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.registry import LossFacts

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class SpinActorConfig(ConfigNode):
    """What the loss of SPIN reads."""

    dpo_beta: float = setting(0.1, "strength of the reference policy in the loss on pairs of answers")


def _problems(cfg: Any) -> Problems:
    value = cfg.actor_rollout_ref.actor.dpo_beta
    return in_range(f"{_ACTOR}.dpo_beta", value, "above 0", value > 0)


FACTS = {"dpo": LossFacts(pairs=True)}
RECIPE = Recipe(name="recipe.spin", settings={_ACTOR: SpinActorConfig}, problems=_problems)
