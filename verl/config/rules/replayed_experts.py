"""Router replay: where experts are recorded, where they are replayed, and what supports neither; checked before loading."""

from __future__ import annotations

from typing import Any

from verl.config.machine.config_json import experts_of, facts_of
from verl.config.rules.checks import Problems
from verl.config.schema.root import PPOTrainerConfig, kl_kinds, skips_old_log_prob, updates_once, uses_reference
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

_R, _MODE = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.router_replay.mode"
_REF_MODE = "actor_rollout_ref.ref.router_replay.mode"
_RECORD, _INTERVAL = f"{_R}.enable_rollout_routing_replay", f"{_R}.moe_load_balance_metrics_interval"


def records_experts(rollout: Any) -> bool:
    """Whether the sampler of this section says which experts it chose."""
    return bool(rollout.enable_rollout_routing_replay or rollout.moe_load_balance_metrics_interval > 0)


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What cannot be recorded, and what cannot be replayed."""
    rollout, actor = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor
    key = _RECORD if rollout.enable_rollout_routing_replay else _INTERVAL
    value: Any = rollout[key.rpartition(".")[2]]
    mode = actor.router_replay.mode
    faults: Problems = []
    if rollout.moe_load_balance_metrics_interval < 0:
        faults.append(ConfigError("no number of steps", key=_INTERVAL, got=value, allowed="0 (never), or 1 or more"))
    if records_experts(rollout):
        faults += _sampler(cfg, key, value) + _mixture(cfg, key, value)
    faults += _reference(cfg)
    if mode == "disabled":
        return faults
    if mode == "R3" and not rollout.enable_rollout_routing_replay:
        message = "R3 replays the experts that the sampler chose, which are not recorded"
        faults.append(ConfigError(message, key=_RECORD, got=False, fix=f"Set {_RECORD}=true, or {_MODE}=R2."))
    if mode == "R2" and skips_old_log_prob(cfg) and not updates_once(cfg):
        message = "R2 replays the experts of the pass over old log-probs, and this run makes no such pass"
        fix = "Set it to R3, or leave out what takes other log-probs as the old ones (bypass_mode, use_rollout_log_probs)."
        faults.append(ConfigError(message, key=_MODE, got=mode, fix=fix))
    return faults + ([] if records_experts(rollout) else _mixture(cfg, _MODE, mode))


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice where a choice is recorded and nothing replays it, or replayed where it cannot differ."""
    mode, records = cfg.actor_rollout_ref.actor.router_replay.mode, cfg.actor_rollout_ref.rollout
    if mode == "R2" and updates_once(cfg) and skips_old_log_prob(cfg):
        notice(_MODE, "R2 has no effect: with one update per batch the experts are those of that very pass")
    if cfg.actor_rollout_ref.ref.router_replay.mode != "disabled" and not uses_reference(cfg):
        notice(_REF_MODE, "has no effect: no reference policy is used")
    if records.enable_rollout_routing_replay and mode != "R3":
        notice(_RECORD, f"what the sampler records is not replayed with {_MODE}={mode}")


def _reference(cfg: PPOTrainerConfig) -> Problems:
    """The reference replays what the actor does, in a pass of its own, behind that over old log-probs."""
    mode, actor = cfg.actor_rollout_ref.ref.router_replay.mode, cfg.actor_rollout_ref.actor.router_replay.mode
    if mode == "disabled":
        return []
    if mode != actor:
        message = f"the reference replays the experts that the actor replays, and {_MODE} is {actor}"
        allowed = dict.fromkeys(("disabled", actor))
        return [ConfigError(message, key=_REF_MODE, got=mode, allowed=list(allowed), fix="Set both alike.")]
    if mode == "R2" and skips_old_log_prob(cfg) and uses_reference(cfg):
        message = "R2 replays the experts of the pass over old log-probs, and this run makes no such pass"
        fix = "Set trainer.skip_old_log_prob=false, or leave it out."
        return [ConfigError(message, key=_REF_MODE, got=mode, fix=fix)]
    exact = [key for key, kind in kl_kinds(cfg).items() if kind == "full"]
    if exact:
        message = f"the reference of an exact KL ({exact[0]}) chooses its experts itself"
        fix = f"Leave it out, or take another kind of {exact[0]}."
        return [NotBuiltError(message, key=_REF_MODE, got=mode, fix=fix)]
    return []


def _sampler(cfg: PPOTrainerConfig, key: str, value: Any) -> Problems:
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name != "hf":
        message = f"the sampler {rollout.name} does not say which experts it chose"
        return [NotBuiltError(message, key=key, got=value, fix=f"Leave it out, or set {_R}.name=hf.")]
    if rollout.checkpoint_engine.backend != "naive":
        backend = f"{_R}.checkpoint_engine.backend"
        message = f"a sampler in a process of its own ({backend}) does not send the experts it chose"
        return [NotBuiltError(message, key=key, got=value, fix=f"Leave it out, or {backend}.")]
    return []


def _mixture(cfg: PPOTrainerConfig, key: str, value: Any) -> Problems:
    facts = facts_of(cfg.actor_rollout_ref.model.path)
    if facts is None or experts_of(facts) is not None:
        return []
    message = "the model is dense: it has no experts that could be recorded or replayed"
    return [ConfigError(message, key=key, got=value, fix="Leave it out.")]
