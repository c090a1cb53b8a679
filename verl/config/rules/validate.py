"""Rules between settings, checked before anything is allocated.

What one setting may be is said where it is declared, what this machine has in `host`; here is what settings must be
together. A combination that cannot work is an error with the change that makes it work; one that works but does nothing
is a notice.
"""

from __future__ import annotations

from typing import Any

from verl import registry
from verl.config.loading import recipes
from verl.config.machine import host, models, pools, topology
from verl.config.machine.pools import Pools
from verl.config.machine.roles import roles
from verl.config.rules import losses, optimizers, queues, runs, sampling, sections
from verl.config.rules.checks import (
    Check,
    Problems,
    Table,
    collect,
    known_name,
    missing_folder,
    out_of_bounds,
    problems_of_rows,
    tell,
    tell_without_effect,
)
from verl.config.schema.node import unrecorded
from verl.config.schema.root import PPOTrainerConfig, uses_critic
from verl.errors import ConfigError

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ONE_DEVICE = "Leave it out (auto) to train on one device."
TABLE: Table = {**sections.TABLE, PPOTrainerConfig: (*runs.ROWS, *losses.ROWS, *sampling.ROWS)}
"""Every row there is."""
ALWAYS: tuple[Check, ...] = (out_of_bounds, problems_of_rows(TABLE))


def validate(cfg: PPOTrainerConfig, served: bool = False) -> None:
    """All problems of an RL configuration in one `ConfigError`; settings without effect get a notice each.

    Args:
        served: the program samples by servers that it starts, and has no workers.
    """
    here = (
        host.trackers,
        host.traces,
        host.rollout_engine,
        host.hardware,
        host.files,
        host.kernel_problems,
        resume_folder,
    )
    with unrecorded():
        features = _features(cfg)
        here += tuple(feature.lacking for feature in features if hasattr(feature, "lacking"))
        collect((*here, *_rules(cfg, served)), cfg)
        _tell(cfg, features)


def _features(cfg: PPOTrainerConfig) -> list[Any]:
    """The modules of rules that judge what only some runs have, imported where this one has it.

    Each has ``problems``, and may have ``tell`` (notices) and ``lacking`` (what this machine does not have).
    """
    features: list[Any] = []
    engines = {role.section.strategy for role in roles(cfg)}
    if "megatron" in engines:
        from verl.config.rules import validate_megatron

        features.append(validate_megatron)
    if "torchtitan" in engines:
        from verl.config.rules import validate_torchtitan

        features.append(validate_torchtitan)
    if cfg.distillation.enabled:
        from verl.config.rules import distillation

        features.append(distillation)
    if cfg.reward.reward_model.enable:
        from verl.config.rules import reward_model

        features.append(reward_model)
    policy = cfg.actor_rollout_ref
    profilers = (policy.actor.profiler, policy.ref.profiler, policy.rollout.profiler, cfg.critic.profiler)
    if cfg.global_profiler.steps or any(profiler.enable for profiler in profilers):
        from verl.config.machine import profiling

        features.append(profiling)
    return features


def check_printed(cfg: PPOTrainerConfig) -> None:
    """What refuses a run wherever it is started, for a configuration that is only printed: names, numbers, relations.

    Raises:
        ConfigError: as `validate` does, without what only this machine decides.
    """
    with unrecorded():
        collect(_rules(cfg, served=False), cfg)


def _rules(cfg: PPOTrainerConfig, served: bool) -> tuple[Check, ...]:
    """What no machine changes."""
    placed = (pools.served_problems,) if served else (topology.problems,)
    of_features = (feature.problems for feature in _features(cfg))
    return (_names, *ALWAYS, optimizers.problems, losses.problems, runs.uneven_mini_batches, *placed, runs.row_problems,
            models.problems, models.vllm_problems, models.policy_problems, recipes.problems, sampling.thresholds,
            queues.problems, pools.elastic_problems, *of_features)  # fmt: skip


def _tell(cfg: PPOTrainerConfig, features: list[Any]) -> None:
    """Every notice of an RL configuration."""
    runs.tell(cfg)
    tell(TABLE, cfg)
    tell_without_effect(cfg)
    pools.tell_elastic(cfg)
    for part in (losses, sampling, pools, queues, *features, *recipes.of_run(cfg)):
        if hasattr(part, "tell"):
            part.tell(cfg)


def _transport(cfg: PPOTrainerConfig) -> Problems:
    """How weights get to the sampler: a known transport, and an engine that is hosted here.

    In a pool of their own SGLang's servers are started by workers, which put what a transport brings into a folder.
    """
    rollout = cfg.actor_rollout_ref.rollout
    engine, key = rollout.checkpoint_engine, f"{_R}.checkpoint_engine.backend"
    if engine.backend == "naive":
        return []
    is_separate = rollout.name == "sglang" and "rollout" in Pools.of(cfg).named
    if rollout.name in ("server", "sglang") and not is_separate:
        fix = f"Leave it out, or set {_R}.name=vllm or hf."
        return [ConfigError("a server takes its weights through a folder", key=key, got=engine.backend, fix=fix)]
    if engine.custom_backend_module:
        return []  # the module registers it where the sampler is made
    return known_name(
        registry.TRANSPORTS, key, engine.backend, f"Leave it out, or take one of these with {_R}.name=hf."
    )


def _names(cfg: PPOTrainerConfig) -> Problems:
    actor, rollout, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.ref
    manager, default = cfg.reward.reward_manager, "Leave it out to take the default."
    loop = rollout.agent.default_agent_loop
    problems = known_name(
        registry.ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator", cfg.algorithm.adv_estimator, "Take one of these."
    )
    problems += known_name(registry.SCHEDULES, "trainer.v1.trainer_mode", cfg.trainer.v1.trainer_mode, "Leave it out.")
    problems += known_name(registry.POLICY_LOSSES, f"{_A}.policy_loss.loss_mode", actor.policy_loss.loss_mode, default)
    key = "distillation.distillation_loss.policy_loss_mode"
    problems += known_name(registry.POLICY_LOSSES, key, cfg.distillation.distillation_loss.policy_loss_mode, default)
    problems += known_name(registry.SAMPLERS, f"{_R}.name", rollout.name, f"Set {_R}.name=hf.")
    problems += _transport(cfg)
    if rollout.agent.agent_loop_config_path is None:  # the names in that file are known where it is read
        problems += known_name(registry.AGENT_LOOPS, f"{_R}.agent.default_agent_loop", loop, default)
    problems += known_name(registry.TOOL_PARSERS, f"{_R}.multi_turn.format", rollout.multi_turn.format, default)
    if manager.source == "register":
        problems += known_name(registry.REWARD_MANAGERS, "reward.reward_manager.name", manager.name, default)
    sections = {_A: actor, "actor_rollout_ref.ref": ref} | ({"critic": cfg.critic} if uses_critic(cfg) else {})
    for key, section in sections.items():
        if section.strategy != "auto":
            problems += known_name(registry.ENGINES, f"{key}.strategy", section.strategy, ONE_DEVICE)
    return problems


def resume_folder(cfg: Any) -> Problems:
    """The folder of a step that this machine does not have; one at a remote place is looked for when the run begins."""
    path = cfg.trainer.resume_from_path if cfg.trainer.resume_mode == "resume_path" else None
    is_step = path is not None and "global_step_" in path and "://" not in path
    return missing_folder("trainer.resume_from_path", str(path)) if is_step else []
