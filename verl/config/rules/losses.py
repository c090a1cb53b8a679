"""Rules about estimators and policy losses with settings of their own: what each needs, and which settings do nothing."""

from __future__ import annotations

from verl.config.rules import pairs
from verl.config.rules.checks import Problems
from verl.config.rules.rule import value_at
from verl.config.schema.node import changed_names
from verl.config.schema.root import PPOTrainerConfig, of_estimator, of_loss
from verl.errors import ConfigError
from verl.metrics import notice
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, is_dotted

_A = "actor_rollout_ref.actor"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What an estimator or a loss needs and does not have."""
    return [*_loss(cfg), *_estimator(cfg), *pairs.problems(cfg)]


def _loss(cfg: PPOTrainerConfig) -> Problems:
    actor = cfg.actor_rollout_ref.actor
    loss, problems = actor.policy_loss, []
    for name in of_loss(cfg).required:
        if value_at(actor, name) is None:
            message = f"the policy loss {loss.loss_mode!r} has no default for it"
            problems.append(ConfigError(message, key=f"{_A}.{name}", got=None, fix="Set it."))
    return problems


def _estimator(cfg: PPOTrainerConfig) -> Problems:
    algorithm, problems = cfg.algorithm, []
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    listed = of_estimator(cfg).rewards
    if listed is not None and not algorithm[listed]:
        message = f"the estimator {algorithm.adv_estimator!r} normalises several rewards apart"
        fix = "List the keys that the scorer returns."
        problems.append(ConfigError(message, key=f"algorithm.{listed}", got=algorithm[listed], fix=fix))
    if keys and weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        problems.append(ConfigError(f"{len(keys)} rewards have {len(weights)} weights", key=key, got=weights))
    return problems


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice of every changed setting that nothing reads in this run."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    sections = {
        _A: actor,
        f"{_A}.policy_loss": actor.policy_loss,
        "algorithm": algorithm,
        "algorithm.pf_ppo": algorithm.pf_ppo,
    }
    changed = {f"{key}.{name}" for key, section in sections.items() for name in changed_names(section)}
    for key, why in without_effect(cfg, changed).items():
        notice(key, why)


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
