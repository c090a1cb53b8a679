"""Rules about the trainers' devices that sample while the trainer waits (``hybrid_rollout`` of ``separate_async``)."""

from __future__ import annotations

import math

from verl.config.checks import Problems, in_range
from verl.config.node import changed_names
from verl.config.pools import Pools
from verl.config.queues import samples_beside
from verl.config.root import PPOTrainerConfig, sampler_is_old_policy
from verl.config.topology import processes_of
from verl.errors import ConfigError
from verl.metrics import notice

_S = "trainer.v1.separate_async.hybrid_rollout"
KEY = f"{_S}.enable_switch"
_R = "actor_rollout_ref.rollout"


def lends(cfg: PPOTrainerConfig) -> bool:
    """Whether the trainers' processes hold replicas that sample while the trainer waits."""
    return cfg.trainer.v1.separate_async.hybrid_rollout.enable_switch and not _why_not(cfg)


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Numbers out of range, and samplers that trainers cannot hold beside their model."""
    if cfg.trainer.v1.trainer_mode != "separate_async":
        return []
    numbers = _numbers(cfg)
    return numbers if numbers or not lends(cfg) else _samplers(cfg)


def _numbers(cfg: PPOTrainerConfig) -> Problems:
    rules, problems = cfg.trainer.v1.separate_async.hybrid_rollout, list[ConfigError]()
    ratio = rules.switch_threshold_ratio
    problems += in_range(f"{_S}.switch_threshold_ratio", ratio, "above 0 and at most 1", 0 < ratio <= 1)
    for name in ("switch_threshold_step_up", "switch_threshold_step_down"):
        value = rules[name]
        problems += in_range(f"{_S}.{name}", value, "0 or more", value >= 0 and math.isfinite(value))
    for name in ("switch_threshold_release_steps", "switch_cost_window_size"):
        problems += in_range(f"{_S}.{name}", rules[name], "1 or more", rules[name] >= 1)
    return problems


def _samplers(cfg: PPOTrainerConfig) -> Problems:
    rollout, trainers = cfg.actor_rollout_ref.rollout, Pools.of(cfg).of_role("actor")
    problems: Problems = []
    if rollout.name == "sglang":
        message = (
            "SGLang's servers take weights through a folder, which is too slow for devices that are lent for a while"
        )
        problems.append(ConfigError(message, key=KEY, got=True, fix=f"Leave it out, or set {_R}.name=vllm or hf."))
    if rollout.max_replacements:
        message = f"{_R}.max_replacements={rollout.max_replacements} has replicas come and go by themselves, and lost "
        message += "replicas would be replaced by the trainers' own"
        fix = f"Leave one of the two out: {_R}.max_replacements=0."
        problems.append(ConfigError(message, key=KEY, got=True, fix=fix))
    each = processes_of(rollout, trainers.size)
    uneven = [count for count in trainers.processes if count % each]
    if uneven:
        message = f"a replica takes {each} processes, and a node of the trainers has {uneven[0]}"
        fix = f"Leave it out, or let the trainers have a multiple of {each} processes on each node."
        problems.append(ConfigError(message, key=KEY, got=True, fix=fix))
    return problems


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice where nothing is lent, and of the settings that then have no effect."""
    rules = cfg.trainer.v1.separate_async.hybrid_rollout
    if cfg.trainer.v1.trainer_mode != "separate_async":
        return  # the notice about the section says it
    if rules.enable_switch:
        why = _why_not(cfg)
        if why:
            return notice(KEY, f"has no effect: {why}")
        if not sampler_is_old_policy(cfg):
            why = "a step takes its batch as a whole, so lent devices are given back once all its groups are complete"
            notice(f"{_S}.switch_threshold_ratio", f"has no effect: {why}")
    others = changed_names(rules)
    if not rules.enable_switch and others:
        notice(f"{_S}.{others[0]}", f"has no effect without {KEY}=true")
    elif not rules.adaptive_switch_threshold:
        named = ("switch_threshold_step_up", "switch_threshold_step_down", "switch_threshold_release_steps")
        for name in (name for name in named if name in others):
            notice(f"{_S}.{name}", f"has no effect with {_S}.adaptive_switch_threshold=false")


def _why_not(cfg: PPOTrainerConfig) -> str:
    if cfg.trainer.v1.trainer_mode != "separate_async":
        return "only trainer.v1.trainer_mode=separate_async lends devices"
    if not samples_beside(cfg):
        return (
            f"the samplers share the trainers' processes and sample there anyway. Set {_R}.nnodes=1, which gives them a "
            "pool on Ray"
        )
    return ""
