"""Rules about responses that several versions of the policy draw: over several steps, or while weights arrive."""

from __future__ import annotations

from verl.config.rules.checks import Problems
from verl.config.schema.root import (
    PPOTrainerConfig,
    corrects_rollout,
    learns_from_pairs,
    of_schedule,
    sampler_is_old_policy,
)
from verl.errors import ConfigError
from verl.metrics import notice

_R = "actor_rollout_ref.rollout"
AT_UPDATE, KEEPS, RATE = f"{_R}.requests_at_update", f"{_R}.keep_unfinished", f"{_R}.over_sample_rate"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with it."""
    rollout = cfg.actor_rollout_ref.rollout
    mixing: dict[str, object] = {}
    if rollout.requests_at_update != "wait":
        mixing[AT_UPDATE] = rollout.requests_at_update
    mixing |= {KEEPS: True} if rollout.keep_unfinished else {}
    problems = [_unrecorded(key, value) for key, value in mixing.items() if not rollout.calculate_log_probs]
    return problems + (_kept(cfg) if rollout.keep_unfinished else [])


def _kept(cfg: PPOTrainerConfig) -> Problems:
    """Responses continue in the next step, with no bound on their age but the one of a queue."""
    accounts_for_age = sampler_is_old_policy(cfg) or corrects_rollout(cfg) or learns_from_pairs(cfg)
    if of_schedule(cfg).queue or accounts_for_age:
        return []
    message = f"{KEEPS}=true trains on tokens of older versions, and nothing accounts for the difference"
    fix = (
        "Set algorithm.rollout_correction.bypass_mode=true (the old log-probs are those of the version that drew "
        "each token), or a correction, e.g. algorithm.rollout_correction.rollout_is=token."
    )
    return [ConfigError(message, key="algorithm.rollout_correction.bypass_mode", got=False, fix=fix)]


def _unrecorded(key: str, value: object) -> ConfigError:
    message = f"{key}={value} lets several versions draw one response, whose log-probs no single version can recompute"
    fix = f"Set {_R}.calculate_log_probs=true: each token keeps the log-prob of the version that drew it."
    return ConfigError(message, key=f"{_R}.calculate_log_probs", got=False, fix=fix)


def tell(cfg: PPOTrainerConfig) -> None:
    """Settings without effect in this run."""
    rollout, mode = cfg.actor_rollout_ref.rollout, cfg.trainer.v1.trainer_mode
    if rollout.keep_unfinished:
        _tell_kept(cfg)
    if rollout.requests_at_update == "wait":
        return
    if mode in ("sync", "one_step_off"):
        notice(AT_UPDATE, f"has no effect with trainer.v1.trainer_mode={mode}: no request runs when weights arrive")
    elif cfg.actor_rollout_ref.hybrid_engine:
        notice(AT_UPDATE, "has no effect with actor_rollout_ref.hybrid_engine=true: samplers and trainers take turns")


def _tell_kept(cfg: PPOTrainerConfig) -> None:
    """Where every response that is begun ends before the update."""
    rollout = cfg.actor_rollout_ref.rollout
    if of_schedule(cfg).queue:
        if rollout.requests_at_update == "wait":
            notice(KEEPS, f"has no effect with {AT_UPDATE}=wait: an update waits for the responses in flight")
    elif rollout.over_sample_rate == 0 and not cfg.algorithm.filter_groups.enable:
        why = "samples no more prompts than a step trains on, so all are waited for"
        notice(KEEPS, f"has no effect with {RATE}=0, which {why}; {RATE}=0.25 leaves a quarter in work")
