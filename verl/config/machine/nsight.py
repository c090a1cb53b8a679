"""With which options Ray starts Nsight Systems around the workers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.config.schema.profiler import ProfilerConfig
from verl.config.schema.root import PPOTrainerConfig, uses_critic, uses_reference

USUAL = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "cuda-graph-trace": "graph",
    "capture-range": "cudaProfilerApi",
    "kill": "none",
}
"""Options that a run sets where it names no others."""
CAPTURES_PER_STEP = 6
"""Captures that one process may make in a step: each call of a role's methods where they are discrete."""
_A = "actor_rollout_ref"


def profiled_roles(cfg: PPOTrainerConfig) -> Iterator[tuple[str, ProfilerConfig]]:
    """The roles of a run that can be profiled: key and section ``profiler``."""
    policy = cfg.actor_rollout_ref
    yield f"{_A}.actor.profiler", policy.actor.profiler
    yield f"{_A}.rollout.profiler", policy.rollout.profiler
    if uses_reference(cfg):
        yield f"{_A}.ref.profiler", policy.ref.profiler
    if uses_critic(cfg):
        yield "critic.profiler", cfg.critic.profiler


def worker_nsight_options(cfg: PPOTrainerConfig) -> dict[str, str]:
    """The options for the processes of workers; none where no step of a role is profiled by nsys."""
    settings = cfg.global_profiler
    is_profiled = any(section.enable and section.tool == "nsys" for _, section in profiled_roles(cfg))
    if settings.tool != "nsys" or not settings.steps or not is_profiled:
        return {}
    return nsight_options({**USUAL, **settings.global_tool_config.nsys.worker_nsight_options}, settings.steps)


def nsight_options(options: Mapping[str, Any], steps: Sequence[int] | None) -> dict[str, str]:
    """Options as Ray gives them to ``nsys profile``.

    Args:
        options: a null leaves one out; ``capture-range-end`` is then counted.
        steps: that are profiled.
    """
    flags = {name: _text(value) for name, value in options.items() if value is not None}
    if not steps or "capture-range" not in flags:  # without captures there is none to count
        return flags
    return {"capture-range-end": f"repeat-shutdown:{CAPTURES_PER_STEP * len(steps)}", **flags}


def _text(value: Any) -> str:
    """As nsys reads it: true and false in small letters, the elements of a list with commas."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
