"""Rules about replicas that are replaced during a run (``rollout.max_replacements``)."""

from __future__ import annotations

from verl.config.machine.pools import Pools, starts_no_engine
from verl.config.rules.checks import Problems
from verl.config.schema.bounds import in_range
from verl.config.schema.root import PPOTrainerConfig
from verl.errors import ConfigError
from verl.metrics import notice

KEY = "actor_rollout_ref.rollout.max_replacements"


def is_elastic(cfg: PPOTrainerConfig) -> bool:
    """Whether each replica is a separate process, which is replaced when it is lost."""
    return cfg.actor_rollout_ref.rollout.max_replacements > 0 and not _why_not(cfg)


def problems(cfg: PPOTrainerConfig) -> Problems:
    """A number below 0, and a pool that replicas share with another role."""
    number, pools = cfg.actor_rollout_ref.rollout.max_replacements, Pools.of(cfg)
    shared = sorted(
        role for role in pools.named if role != "rollout" and pools.of_role(role) == pools.of_role("rollout")
    )
    if number > 0 and not _why_not(cfg) and shared:
        message = f"a replica would be replaced together with {', '.join(shared)}, which share its process"
        fix = "Give the samplers a pool that holds no other role."
        return [ConfigError(message, key=KEY, got=number, allowed=[0], fix=fix)]
    return in_range(KEY, number, "0 or more", number >= 0)


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice where nothing can be replaced."""
    if cfg.actor_rollout_ref.rollout.max_replacements > 0:
        why = _why_not(cfg)
        if why:
            notice(KEY, f"has no effect: {why}")
        elif cfg.actor_rollout_ref.rollout.profiler.enable:
            notice(
                f"{KEY}, profiler", "replicas that are replaced are not profiled, only the process with their service"
            )


def _why_not(cfg: PPOTrainerConfig) -> str:
    pools = Pools.of(cfg)
    if starts_no_engine(cfg.actor_rollout_ref.rollout):
        return "the servers that sample run already, and their operator replaces them"
    if pools.of_role("rollout") == pools.of_role("actor"):
        return (
            "the samplers share the trainers' processes, and one that dies takes its trainer along. Set "
            "actor_rollout_ref.hybrid_engine=false, which gives them a pool on Ray"
        )
    return ""
