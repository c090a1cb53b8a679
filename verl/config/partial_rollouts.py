"""Rules about responses that several versions of the policy draw: what new weights do to requests in flight."""

from __future__ import annotations

from verl.config.checks import Problems
from verl.config.root import PPOTrainerConfig
from verl.errors import ConfigError
from verl.metrics import notice

_R = "actor_rollout_ref.rollout"
AT_UPDATE = f"{_R}.requests_at_update"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with it."""
    rollout = cfg.actor_rollout_ref.rollout
    mixing = {AT_UPDATE: rollout.requests_at_update} if rollout.requests_at_update != "wait" else {}
    return [_unrecorded(key, value) for key, value in mixing.items() if not rollout.calculate_log_probs]


def _unrecorded(key: str, value: object) -> ConfigError:
    message = f"{key}={value} lets several versions draw one response, whose log-probs no single version can recompute"
    fix = f"Set {_R}.calculate_log_probs=true: each token keeps the log-prob of the version that drew it."
    return ConfigError(message, key=f"{_R}.calculate_log_probs", got=False, fix=fix)


def tell(cfg: PPOTrainerConfig) -> None:
    """Settings without effect in this run."""
    if cfg.actor_rollout_ref.rollout.requests_at_update == "wait":
        return
    if cfg.trainer.v1.trainer_mode == "sync":
        notice(AT_UPDATE, "has no effect with trainer.v1.trainer_mode=sync: no request runs when weights arrive")
    elif cfg.actor_rollout_ref.hybrid_engine:
        notice(AT_UPDATE, "has no effect with actor_rollout_ref.hybrid_engine=true: samplers and trainers take turns")
