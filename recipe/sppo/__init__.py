"""SPPO (Wu et al., arXiv 2405.00675)."""

from dataclasses import dataclass
from typing import Any

from verl.config import ConfigNode, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.registry import EstimatorFacts, LossFacts

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class SppoActorConfig(ConfigNode):
    """What the loss of SPPO reads."""

    sppo_eta: float = setting(1.0, "what the log-ratio of an answer should be, in its advantages")


def _problems(cfg: Any) -> Problems:
    value = cfg.actor_rollout_ref.actor.sppo_eta
    return in_range(f"{_ACTOR}.sppo_eta", value, "above 0", value > 0)


FACTS = {"centred": EstimatorFacts(groups=True), "sppo": LossFacts(one_row=True)}
RECIPE = Recipe(name="recipe.sppo", settings={_ACTOR: SppoActorConfig}, problems=_problems)
