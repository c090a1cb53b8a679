"""Rules about the rollout correction and dynamic sampling: what must be set together, and what contradicts itself."""

from __future__ import annotations

from verl.config.rules import sampled_log_probs
from verl.config.rules.checks import Problems, caught
from verl.config.schema.root import PPOTrainerConfig, of_estimator
from verl.config.schema.thresholds import importance_sampling, rejections, weight_bounds
from verl.errors import ConfigError

_R, _NEWER, _OLDER = "actor_rollout_ref.rollout", "algorithm.rollout_correction", "algorithm.rollout_is"


def rollout(cfg: PPOTrainerConfig) -> Problems:
    """Importance weights and rejection between the sampler and the trainer, in either form."""
    algorithm, newer = cfg.algorithm, cfg.algorithm.rollout_correction
    problems = _thresholds(cfg)
    key = _switched_on_by(cfg)
    if key is None:
        return problems
    if not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        message = f"{key} compares the trainer's log-probs with the sampler's, which are not kept"
        fix = f"Set {_R}.calculate_log_probs=true."
        problems.append(ConfigError(message, key=f"{_R}.calculate_log_probs", got=False, fix=fix))
    if algorithm.rollout_is_threshold is not None and key.startswith(_NEWER):
        message = f"{_OLDER}_threshold and {key} are two forms of one correction"
        problems.append(ConfigError(message, key=key, fix="Keep one of them."))
    return problems + sampled_log_probs.problems(cfg, key) + (_bypass(cfg) if newer.bypass_mode else [])


def _thresholds(cfg: PPOTrainerConfig) -> Problems:
    algorithm, newer = cfg.algorithm, cfg.algorithm.rollout_correction
    problems: Problems = []
    if algorithm.rollout_is_threshold is not None:
        problems += caught(
            importance_sampling,
            algorithm.rollout_is_threshold,
            algorithm.rollout_is_threshold_lower,
            algorithm.rollout_is_level,
            algorithm.rollout_is_mode,
            algorithm.rollout_is_veto_threshold,
        )
    if newer.rollout_is is not None:
        problems += caught(weight_bounds, newer.rollout_is_threshold)
    if newer.rollout_rs is not None:
        problems += caught(rejections, newer.rollout_rs, newer.rollout_rs_threshold)
    return problems + ([] if problems else _mirror(cfg))


def _mirror(cfg: PPOTrainerConfig) -> Problems:
    """The correction settings of the bypass mode's loss, which must agree with those of the algorithm."""
    mirror, newer, problems = (
        cfg.actor_rollout_ref.actor.policy_loss.rollout_correction,
        cfg.algorithm.rollout_correction,
        [],
    )
    if mirror.rollout_is_threshold != newer.rollout_is_threshold:
        problems += caught(weight_bounds, mirror.rollout_is_threshold)
    if mirror.rollout_rs is not None:
        problems += caught(rejections, mirror.rollout_rs, mirror.rollout_rs_threshold)
    place = "actor_rollout_ref.actor.policy_loss.rollout_correction"
    keys = [str(error.key).replace(_NEWER, place) for error in problems]
    return [ConfigError(e.message, key=key, got=e.got, allowed=e.allowed, fix=e.fix) for e, key in zip(problems, keys)]


def _bypass(cfg: PPOTrainerConfig) -> Problems:
    if not of_estimator(cfg).old_log_probs:
        return []
    estimator = cfg.algorithm.adv_estimator
    message = f"the estimator {estimator!r} needs the pass over old log-probs, which the bypass mode leaves out"
    return [ConfigError(message, key=f"{_NEWER}.bypass_mode", got=True, fix="Set it to false.")]


def _switched_on_by(cfg: PPOTrainerConfig) -> str | None:
    """The setting that switches a correction of the sampler's distribution on; the newer form first."""
    newer = cfg.algorithm.rollout_correction
    switches = {
        f"{_NEWER}.bypass_mode": newer.bypass_mode,
        f"{_NEWER}.rollout_is": newer.rollout_is is not None,
        f"{_NEWER}.rollout_rs": newer.rollout_rs is not None,
        f"{_OLDER}_threshold": cfg.algorithm.rollout_is_threshold is not None,
        _OLDER: cfg.algorithm.rollout_is,
    }
    return next((key for key, is_on in switches.items() if is_on), None)


def groups(cfg: PPOTrainerConfig) -> Problems:
    """Dynamic sampling keeps the groups whose samples differ in something that can be equal."""
    rule = cfg.algorithm.filter_groups
    if not rule.enable:
        return []
    if rule.max_inflight_gen_batches < 1:
        key, got = "algorithm.filter_groups.max_inflight_gen_batches", rule.max_inflight_gen_batches
        return [
            ConfigError("at least one batch of prompts is sampled at a time", key=key, got=got, allowed="1 or more")
        ]
    if rule.metric == "seq_final_reward" and cfg.algorithm.use_kl_in_reward:
        key = "algorithm.filter_groups.metric"
        message = "with a KL in the reward no two samples have the same final reward, so that nothing would be dropped"
        return [ConfigError(message, key=key, got=rule.metric, fix=f"Set {key}=seq_reward, the score before the KL.")]
    return []
