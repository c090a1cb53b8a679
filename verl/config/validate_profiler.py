"""Rules about profiling: what would record nothing is said before the run, not after it."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.checks import Problems
from verl.config.planned import INSTEAD
from verl.config.profiler import ProfilerConfig
from verl.config.root import PPOTrainerConfig, uses_critic, uses_reference
from verl.config.sft import SFTTrainerConfig
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

LATER = {
    "nsys": "profiling with Nsight Systems",
    "npu": "profiling on Ascend",
    "precision_debugger": "the msprobe precision debugger",
}
_STEPS, _A = "global_profiler.steps", "actor_rollout_ref"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of ``global_profiler`` and the roles' sections ``profiler``."""
    settings, roles = cfg.global_profiler, dict(_roles(cfg))
    steps, enabled = settings.steps or [], [key for key, section in roles.items() if section.enable]
    problems = [problem for key in enabled for problem in _of_role(key, roles[key], cfg.trainer.device)]
    if any(not isinstance(step, int) or step < 1 for step in steps):
        problems.append(ConfigError("steps are counted from 1", key=_STEPS, got=steps))
    if steps and not enabled:
        switches = ", ".join(f"{key}.enable" for key in roles)
        notice(_STEPS, f"nothing is profiled without one of {switches}")
    if enabled and not steps:
        notice(f"{enabled[0]}.enable", f"nothing is profiled without {_STEPS}, for instance {_STEPS}=[2]")
    return problems


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
    """Of ``profiler`` and ``trainer.profile_interval`` in a supervised run."""
    interval, key = cfg.trainer.profile_interval, "trainer.profile_interval"
    if len(interval) != 2 or any(not isinstance(step, int) for step in interval):
        return [ConfigError("it takes two steps, the first and the last", key=key, got=interval, allowed="[2, 3]")]
    asked = interval[0] >= 1
    if asked and interval[1] < interval[0]:
        return [ConfigError("the last step lies before the first", key=key, got=interval)]
    if not cfg.profiler.enable:
        if asked:
            notice(key, "nothing is profiled without profiler.enable=true")
        return []
    if not asked:
        notice("profiler.enable", f"nothing is profiled without {key}, for instance {key}=[2,2]")
    return _of_role("profiler", cfg.profiler, cfg.trainer.device)


def _roles(cfg: PPOTrainerConfig) -> Iterator[tuple[str, ProfilerConfig]]:
    policy = cfg.actor_rollout_ref
    yield f"{_A}.actor.profiler", policy.actor.profiler
    yield f"{_A}.rollout.profiler", policy.rollout.profiler
    if uses_reference(cfg):
        yield f"{_A}.ref.profiler", policy.ref.profiler
    if uses_critic(cfg):
        yield "critic.profiler", cfg.critic.profiler


def _of_role(key: str, section: ProfilerConfig, device: str | None) -> Problems:
    tool, plan = section.tool, section.tool_config.torch.schedule
    if tool is None:
        return [ConfigError("this role is to be profiled, and by no tool", key=f"{key}.tool", fix="Set it to torch.")]
    if tool in LATER:
        later = LATER[tool]
        return [NotBuiltError(f"not built yet: {later}", key=f"{key}.tool", got=tool, fix=INSTEAD[later])]
    if tool == "torch_memory" and _resolved(device) != "cuda":
        message = "torch remembers the allocations of CUDA devices only"
        return [ConfigError(message, key=f"{key}.tool", got=tool, fix="Set it to torch, with contents=[cpu,memory].")]
    if tool == "torch" and section.tool_config.torch.discrete and plan.active > 0:
        message = "a schedule counts the mini-batches of a step, and discrete files have one call each"
        return [ConfigError(message, key=f"{key}.tool_config.torch.discrete", fix="Leave one of the two out.")]
    return []


def _resolved(device: str | None) -> str:
    from verl.device import resolve_device  # torch is loaded only once there is something to validate

    return resolve_device(device)
