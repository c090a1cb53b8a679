"""Rules about responses that several versions of the policy draw: over several steps, or while weights arrive."""

from __future__ import annotations

from verl.config.rules.checks import Problems
from verl.config.schema.root import PPOTrainerConfig, corrects_rollout, learns_from_pairs, sampler_is_old_policy
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
    """Responses go on in the next step."""
    problems: Problems = []
    if cfg.actor_rollout_ref.rollout.over_sample_rate == 0:
        message = f"{KEEPS}=true with {RATE}=0 samples no more prompts than a step trains on, so all are waited for"
        problems.append(ConfigError(message, key=RATE, got=0.0, fix=f"Set {RATE}=0.25, or leave {KEEPS} out."))
    others = {
        "trainer.v1.trainer_mode": (cfg.trainer.v1.trainer_mode, "sync"),
        "algorithm.adv_estimator": (cfg.algorithm.adv_estimator, None),
        "data.oversample_factor": (cfg.data.oversample_factor, 1),
        "algorithm.filter_groups.max_inflight_gen_batches": (
            cfg.algorithm.filter_groups.max_inflight_gen_batches,
            1,
        ),
    }
    reasons = {
        "trainer.v1.trainer_mode": f"schedules with a queue have {AT_UPDATE} instead",
        "algorithm.adv_estimator": "its greedy responses are compared with samples of the same step",
        "data.oversample_factor": "it chooses how many prompts are sampled, too",
        "algorithm.filter_groups.max_inflight_gen_batches": "it chooses how many prompts are sampled, too",
    }
    for key, (value, allowed) in others.items():
        if value == "remax" if key.endswith("adv_estimator") else value != allowed:
            message = f"{key}={value} does not go with {KEEPS}=true: {reasons[key]}"
            problems.append(ConfigError(message, key=key, got=value, fix="Change one of the two."))
    if not (sampler_is_old_policy(cfg) or corrects_rollout(cfg) or learns_from_pairs(cfg)):
        message = f"{KEEPS}=true trains on tokens of older versions, and nothing accounts for the difference"
        fix = (
            "Set algorithm.rollout_correction.bypass_mode=true (the old log-probs are those of the version that drew "
            "each token), or a correction, e.g. algorithm.rollout_correction.rollout_is=token."
        )
        problems.append(ConfigError(message, key="algorithm.rollout_correction.bypass_mode", got=False, fix=fix))
    return problems


def _unrecorded(key: str, value: object) -> ConfigError:
    message = f"{key}={value} lets several versions draw one response, whose log-probs no single version can recompute"
    fix = f"Set {_R}.calculate_log_probs=true: each token keeps the log-prob of the version that drew it."
    return ConfigError(message, key=f"{_R}.calculate_log_probs", got=False, fix=fix)


def tell(cfg: PPOTrainerConfig) -> None:
    """Settings without effect in this run."""
    if cfg.actor_rollout_ref.rollout.requests_at_update == "wait":
        return
    mode = cfg.trainer.v1.trainer_mode
    if mode in ("sync", "one_step_off"):
        notice(AT_UPDATE, f"has no effect with trainer.v1.trainer_mode={mode}: no request runs when weights arrive")
    elif cfg.actor_rollout_ref.hybrid_engine:
        notice(AT_UPDATE, "has no effect with actor_rollout_ref.hybrid_engine=true: samplers and trainers take turns")
