"""FlowRL (Zhu et al., arXiv 2509.15207): match the distribution of rewards instead of maximising the reward."""

from dataclasses import dataclass

from recipe.parts import without_part
from verl.config import ConfigNode, PPOTrainerConfig, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.errors import ConfigError
from verl.registry import EstimatorFacts, LossFacts

_ACTOR, _LOSS = "actor_rollout_ref.actor", "recipe.flowrl.core:flow_balance"
_ESTIMATORS = ("recipe.flowrl.core:group_partition", "recipe.flowrl.core:learned_partition")


@dataclass(frozen=True)
class FlowConfig(ConfigNode):
    """What the estimators of FlowRL read."""

    flowrl_beta: float = setting(15.0, "weight of the normalised reward in the log of the distribution that is matched")


def _problems(cfg: PPOTrainerConfig) -> Problems:
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    problems = in_range("algorithm.flowrl_beta", algorithm.flowrl_beta, "above 0", algorithm.flowrl_beta > 0)
    why = "FlowRL is an estimator and a loss, neither without the other"
    problems += without_part("algorithm.adv_estimator", algorithm.adv_estimator, why, *_ESTIMATORS)
    problems += without_part(f"{_ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, why, _LOSS)
    if algorithm.use_kl_in_reward:
        message, fix = (
            "FlowRL's balance has the KL to the reference: the rewards would charge it twice",
            "Set it to false.",
        )
        problems.append(ConfigError(message, key="algorithm.use_kl_in_reward", got=True, fix=fix))
    if not actor.use_kl_loss:
        message, fix = "FlowRL reads the reference's log-probs", f"Set it to true, with {_ACTOR}.kl_loss_coef=0."
        problems.append(ConfigError(message, key=f"{_ACTOR}.use_kl_loss", got=False, fix=fix))
    return problems


FACTS = {
    "group_partition": EstimatorFacts(groups=True, old_log_probs=True),
    "learned_partition": EstimatorFacts(groups=True, values=True, old_log_probs=True),
    "flow_balance": LossFacts(one_row=True, aggregation="seq-mean-token-mean"),
}
RECIPE = Recipe("recipe.flowrl", settings={"algorithm": FlowConfig}, problems=_problems)
