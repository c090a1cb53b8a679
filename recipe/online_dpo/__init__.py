"""Learning from preferences between the policy's samples: online DPO, XPO (2405.21046) and Nash-MD (2312.00886)."""

from dataclasses import dataclass

from recipe.parts import names_part
from verl.config import ConfigNode, PPOTrainerConfig, setting
from verl.config.loading.recipes import Recipe
from verl.config.rules.checks import Problems
from verl.config.schema.tree import in_range
from verl.errors import ConfigError
from verl.registry import EstimatorFacts, LossFacts

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class OnlineActorConfig(ConfigNode):
    """What the losses on pairs read."""

    online_beta: float = setting(0.1, "online DPO, XPO: strength of the reference policy")
    xpo_alpha: float = setting(1e-5, "XPO: weight of the bonus for leaving the reference's answers")


@dataclass(frozen=True)
class NashConfig(ConfigNode):
    """What the estimator of Nash-MD reads."""

    nash_mixture: float = setting(0.125, "Nash-MD: exponent of the reference in the opponent, policy^(1-m) reference^m")
    nash_scale: float = setting(1.0, "Nash-MD: P(y beats y') = sigmoid((score - score') / nash_scale)")


def _problems(cfg: PPOTrainerConfig) -> Problems:
    actor, algorithm, samples = cfg.actor_rollout_ref.actor, cfg.algorithm, cfg.actor_rollout_ref.rollout.n
    positive = {f"{_ACTOR}.online_beta": actor.online_beta, "algorithm.nash_scale": algorithm.nash_scale}
    problems = [problem for key, value in positive.items() for problem in in_range(key, value, "above 0", value > 0)]
    problems += in_range(f"{_ACTOR}.xpo_alpha", actor.xpo_alpha, "0 or more", actor.xpo_alpha >= 0)
    mixture = algorithm.nash_mixture
    problems += in_range("algorithm.nash_mixture", mixture, "from 0 to 1", 0 <= mixture <= 1)
    if names_part(actor.policy_loss.loss_mode, "xpo"):
        problems += in_range(f"{_ROLLOUT}.n", samples, "2: the bonus weighs the two answers of a pair", samples == 2)
        if not actor.use_rollout_log_probs:
            message, fix = "XPO weighs answers by the policy that drew them", "Set it to true."
            problems.append(ConfigError(message, key=f"{_ACTOR}.use_rollout_log_probs", got=False, fix=fix))
    if names_part(algorithm.adv_estimator, "nash_md"):
        problems += in_range(f"{_ROLLOUT}.n", samples, "3 or more: a mixture has several opponents", samples >= 3)
        if not algorithm.use_kl_in_reward:
            message, fix = "Nash-MD reads the reference's log-probs", "Set it to true."
            problems.append(ConfigError(message, key="algorithm.use_kl_in_reward", got=False, fix=fix))
    return problems


FACTS = {
    "online_dpo": LossFacts(pairs=True),
    "xpo": LossFacts(pairs=True),
    "nash_md": EstimatorFacts(groups=True, old_log_probs=True, on_policy=True),
}
RECIPE = Recipe("recipe.online_dpo", settings={_ACTOR: OnlineActorConfig, "algorithm": NashConfig}, problems=_problems)
