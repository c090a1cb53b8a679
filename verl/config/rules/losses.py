"""Rules about estimators and policy losses with settings of their own: what each needs, and which settings do nothing."""

from __future__ import annotations

from typing import Any

from verl.config.rules import pairs
from verl.config.rules.checks import Problems, in_range
from verl.config.schema.root import PPOTrainerConfig, of_estimator, of_loss
from verl.errors import ConfigError
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, is_dotted

_A = "actor_rollout_ref.actor"
_L = f"{_A}.policy_loss"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What an estimator or a loss needs and does not have."""
    return [*_loss(cfg), *_estimator(cfg), *pairs.problems(cfg)]


def _loss(cfg: PPOTrainerConfig) -> Problems:
    actor = cfg.actor_rollout_ref.actor
    loss, problems = actor.policy_loss, []
    for name in of_loss(cfg).required:
        if _in(actor, name) is None:
            message = f"the policy loss {loss.loss_mode!r} has no default for it"
            problems.append(ConfigError(message, key=f"{_A}.{name}", got=None, fix="Set it."))
    problems += in_range(f"{_L}.dro_beta", loss.dro_beta, "above 0", loss.dro_beta is None or loss.dro_beta > 0)
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        problems += in_range(f"{_L}.{name}", loss[name], "above 0, at most 1", 0 < loss[name] <= 1)
    coef = actor.positive_lm_coef
    problems += in_range(f"{_A}.positive_lm_coef", coef, "0 or more", coef >= 0)
    for name in ("tau_pos", "tau_neg"):
        problems += in_range(f"{_A}.{name}", actor[name], "above 0", actor[name] > 0)
    holds = loss.clip_cov_lb < loss.clip_cov_ub
    return problems + in_range(f"{_L}.clip_cov_lb", loss.clip_cov_lb, f"below clip_cov_ub={loss.clip_cov_ub}", holds)


def _estimator(cfg: PPOTrainerConfig) -> Problems:
    algorithm, problems = cfg.algorithm, []
    alpha, keys, weights = algorithm.vapo_length_alpha, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    problems += in_range("algorithm.vapo_length_alpha", alpha, "above 0, or null", alpha is None or alpha > 0)
    lam = algorithm.vapo_lam_critic
    problems += in_range("algorithm.vapo_lam_critic", lam, "0 to 1", 0 <= lam <= 1)
    listed = of_estimator(cfg).rewards
    if listed is not None and not algorithm[listed]:
        message = f"the estimator {algorithm.adv_estimator!r} normalises several rewards apart"
        fix = "List the keys that the scorer returns."
        problems.append(ConfigError(message, key=f"algorithm.{listed}", got=algorithm[listed], fix=fix))
    if keys and weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        problems.append(ConfigError(f"{len(keys)} rewards have {len(weights)} weights", key=key, got=weights))
    return problems


def without_effect(cfg: PPOTrainerConfig, changed: set[str]) -> dict[str, str]:
    """Changed settings that nothing reads in this run, each with what would give it effect."""
    mode, estimator = cfg.actor_rollout_ref.actor.policy_loss.loss_mode, cfg.algorithm.adv_estimator
    idle = pairs.without_effect(cfg, changed)
    for loss, table, section in ((mode, POLICY_LOSSES, _A), (estimator, ADVANTAGE_ESTIMATORS, "algorithm")):
        if is_dotted(loss):
            continue  # a function of the person's own may read any setting of the section that it is given
        readable = table.facts(loss).settings
        for name in (key.removeprefix(f"{section}.") for key in changed if key.startswith(f"{section}.")):
            owners = table.readers_of(name)
            if owners and name not in readable:
                idle[f"{section}.{name}"] = f"has no effect without {table.key}={owners[0]}"
    aggregation = of_loss(cfg).aggregation
    if f"{_A}.loss_agg_mode" in changed and aggregation is not None:
        idle[f"{_A}.loss_agg_mode"] = f"does not change the policy loss {mode!r}, which takes {aggregation}"
    if not (cfg.algorithm.use_pf_ppo or is_dotted(estimator)):
        for key in ("algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"):
            if key in changed:
                idle[key] = "has no effect without algorithm.use_pf_ppo=true"
    return idle


def _in(section: Any, name: str) -> Any:
    """The value of a setting by its dotted name below a section."""
    for part in name.split("."):
        section = section[part]
    return section
