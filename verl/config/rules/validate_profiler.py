"""Rules about profiling: a profile that would stay empty is an error or a notice before the run."""

from __future__ import annotations

from verl.config.machine import topology
from verl.config.machine.nsight import profiled_roles, worker_nsight_options
from verl.config.rules.checks import Problems
from verl.config.rules.planned import INSTEAD
from verl.config.schema.profiler import ProfilerConfig
from verl.config.schema.root import PPOTrainerConfig
from verl.config.schema.sft import SFTTrainerConfig
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

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


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
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
        message = "Nsight Systems is started around all workers, and a role alone asks for it"
        return [ConfigError(message, key=key, got=cfg.global_profiler.tool, fix=f"Set {key}=nsys.")]
    if counted and topology.Topology.of(cfg).runtime == "local":
        number = counted.rpartition(":")[2]
        notice(key, f"this run is one process, which Ray does not start: start it with {_NSYS}, n={number}")
    return []


def _resolved(device: str | None) -> str:
    from verl.device import resolve_device  # torch is loaded only once there is something to validate

    return resolve_device(device)
