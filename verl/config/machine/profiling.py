"""Rules about profiling: a profile that would stay empty is an error or a notice before the run; the options of nsys."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.config.machine import topology
from verl.config.machine.host import joins_cluster
from verl.config.rules.checks import INSTEAD, Problems
from verl.config.schema.role import ProfilerConfig
from verl.config.schema.root import PPOTrainerConfig, uses_critic, uses_reference
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SupervisedConfig

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


def lacking(cfg: PPOTrainerConfig) -> Problems:
    """No program nsys where a local Ray cluster has to start it; other machines are not checked."""
    if not worker_nsight_options(cfg) or joins_cluster(cfg) or shutil.which("nsys") is not None:
        return []
    fix = "Install Nsight Systems (the package nsight-systems-cli), or set global_profiler.tool=torch."
    return [ConfigError("there is no program 'nsys' here", key="global_profiler.tool", got="nsys", fix=fix)]


LATER = {
    "npu": "profiling on Ascend",
    "precision_debugger": "the msprobe precision debugger",
}
_STEPS = "global_profiler.steps"
_NSYS = "`nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat-shutdown:n python ...`"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of ``global_profiler`` and the roles' sections ``profiler``."""
    settings, roles = cfg.global_profiler, dict(profiled_roles(cfg))
    steps, enabled = settings.steps or [], [key for key, section in roles.items() if section.enable]
    problems = [problem for key in enabled for problem in _of_role(key, roles[key], cfg.trainer.device)]
    if any(not isinstance(step, int) or step < 1 for step in steps):
        problems.append(ConfigError("steps are counted from 1", key=_STEPS, got=steps))
    if steps and not enabled:
        switches = ", ".join(f"{key}.enable" for key in roles)
        notice(_STEPS, f"nothing is profiled without one of {switches}")
    if any(roles[key].tool == "nsys" for key in enabled):
        problems += _nsys(cfg)
    if enabled and not steps:
        notice(f"{enabled[0]}.enable", f"nothing is profiled without {_STEPS}, for instance {_STEPS}=[2]")
    return problems


def sft_problems(cfg: SupervisedConfig) -> Problems:
    """Of ``profiler`` and ``trainer.profile_interval`` in a supervised run."""
    interval, key = cfg.trainer.profile_interval, "trainer.profile_interval"
    if len(interval) != 2 or any(not isinstance(step, int) for step in interval):
        return [ConfigError("it takes two steps, the first and the last", key=key, got=interval, allowed="[2, 3]")]
    has_interval = interval[0] >= 1
    if has_interval and interval[1] < interval[0]:
        return [ConfigError("the last step is before the first", key=key, got=interval)]
    if not cfg.profiler.enable:
        if has_interval:
            notice(key, "nothing is profiled without profiler.enable=true")
        return []
    if not has_interval:
        notice("profiler.enable", f"nothing is profiled without {key}, for instance {key}=[2,2]")
    if cfg.profiler.tool == "nsys":
        notice("profiler.tool", f"nothing starts Nsight Systems here: start every process with {_NSYS}")
    return _of_role("profiler", cfg.profiler, cfg.trainer.device)


def _of_role(key: str, section: ProfilerConfig, device: str | None) -> Problems:
    tool, plan = section.tool, section.tool_config.torch.schedule
    if tool is None:
        return [ConfigError("this role is to be profiled, and by no tool", key=f"{key}.tool", fix="Set it to torch.")]
    if tool in LATER:
        later = LATER[tool]
        return [NotBuiltError(f"not built yet: {later}", key=f"{key}.tool", got=tool, fix=INSTEAD[later])]
    if tool == "nsys" and _resolved(device) != "cuda":
        message = "Nsight Systems is started by what runs on CUDA devices only"
        return [ConfigError(message, key=f"{key}.tool", got=tool, fix="Set it to torch: its traces show the host.")]
    if tool == "torch_memory" and _resolved(device) != "cuda":
        message = "torch remembers the allocations of CUDA devices only"
        return [ConfigError(message, key=f"{key}.tool", got=tool, fix="Set it to torch, with contents=[cpu,memory].")]
    if tool == "torch" and section.tool_config.torch.discrete and plan.active > 0:
        message = "a schedule counts the mini-batches of a step, and discrete files have one call each"
        return [ConfigError(message, key=f"{key}.tool_config.torch.discrete", fix="Leave one of the two out.")]
    return []


def _nsys(cfg: PPOTrainerConfig) -> Problems:
    """Ray starts nsys around the workers, for the run as a whole; a run of one process is started by nsys itself."""
    key, counted = "global_profiler.tool", worker_nsight_options(cfg).get("capture-range-end")
    if cfg.global_profiler.tool != "nsys":
        message = "Nsight Systems is started around all workers, and only a role names it"
        return [ConfigError(message, key=key, got=cfg.global_profiler.tool, fix=f"Set {key}=nsys.")]
    if counted and topology.Topology.of(cfg).runtime == "local":
        number = counted.rpartition(":")[2]
        notice(key, f"this run is one process, which Ray does not start: start it with {_NSYS}, n={number}")
    return []


def _resolved(device: str | None) -> str:
    from verl.device import resolve_device  # torch is loaded only once there is something to validate

    return resolve_device(device)
