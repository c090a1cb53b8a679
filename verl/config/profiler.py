"""Profiler settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class ProfilerToolNsysConfig(ConfigNode):
    """``role.profiler.tool_config.nsys``."""

    discrete: bool | None = setting(
        None, "follows global", follows="global_profiler.global_tool_config.nsys.discrete", planned="profiling"
    )


@dataclass(frozen=True)
class ProfilerToolNpuConfig(ConfigNode):
    """``role.profiler.tool_config.npu``."""

    contents: list = setting([], "npu, cpu, memory, shapes, module, stack", planned="profiling")
    level: str = setting("level0", "level_none, level0..2", planned="profiling")
    analysis: bool = setting(True, "parse after", planned="profiling")
    discrete: bool = setting(False, "file per task", planned="profiling")


@dataclass(frozen=True)
class ProfilerToolTorchScheduleConfig(ConfigNode):
    """``role.profiler.tool_config.torch.schedule``."""

    skip_first: int = setting(0, "mini-batches skipped", planned="profiling")
    wait: int = setting(0, "idle mini-batches", planned="profiling")
    warmup: int = setting(0, "warmup mini-batches", planned="profiling")
    active: int = setting(0, "recorded mini-batches (<=0 off)", planned="profiling")
    repeat: int = setting(0, "cycles", planned="profiling")


@dataclass(frozen=True)
class ProfilerToolTorchConfig(ConfigNode):
    """``role.profiler.tool_config.torch``."""

    contents: list = setting([], "cuda, cpu, memory, shapes, stack", planned="profiling")
    discrete: bool = setting(False, "file per task", planned="profiling")
    schedule: ProfilerToolTorchScheduleConfig = section(ProfilerToolTorchScheduleConfig)


@dataclass(frozen=True)
class ProfilerToolTorchMemoryConfig(ConfigNode):
    """``role.profiler.tool_config.torch_memory``."""

    trace_alloc_max_entries: int = setting(
        100000,
        "follows global",
        follows="global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
        planned="profiling",
    )
    stack_depth: int = setting(
        32, "follows global", follows="global_profiler.global_tool_config.torch_memory.stack_depth", planned="profiling"
    )
    memory_snapshot_num_steps: int = setting(
        1,
        "follows global",
        follows="global_profiler.global_tool_config.torch_memory.memory_snapshot_num_steps",
        planned="profiling",
    )


@dataclass(frozen=True)
class ProfilerToolPrecisionDebuggerConfig(ConfigNode):
    """``role.profiler.tool_config.precision_debugger``."""

    config_path: str | None = setting(
        None,
        "follows global",
        follows="global_profiler.global_tool_config.precision_debugger.config_path",
        planned="profiling",
        path=True,
    )
    steps: list | None = setting(None, "deprecated", planned="profiling")
    stages: list | None = setting(
        None,
        "follows global",
        follows="global_profiler.global_tool_config.precision_debugger.stages",
        planned="profiling",
    )
    strict: bool = setting(
        False,
        "follows global",
        follows="global_profiler.global_tool_config.precision_debugger.strict",
        planned="profiling",
    )


@dataclass(frozen=True)
class ProfilerToolConfigConfig(ConfigNode):
    """``role.profiler.tool_config``."""

    nsys: ProfilerToolNsysConfig = section(ProfilerToolNsysConfig)
    npu: ProfilerToolNpuConfig = section(ProfilerToolNpuConfig)
    torch: ProfilerToolTorchConfig = section(ProfilerToolTorchConfig)
    torch_memory: ProfilerToolTorchMemoryConfig = section(ProfilerToolTorchMemoryConfig)
    precision_debugger: ProfilerToolPrecisionDebuggerConfig = section(ProfilerToolPrecisionDebuggerConfig)


@dataclass(frozen=True)
class ProfilerConfig(ConfigNode):
    """Profiling of one role."""

    tool: str | None = setting(
        None, "follows global_profiler.tool", follows="global_profiler.tool", planned="profiling"
    )
    enable: bool = setting(False, "profile this role", planned="profiling")
    all_ranks: bool = setting(False, "every rank", planned="profiling")
    ranks: list = setting([], "rank list", planned="profiling")
    save_path: str | None = setting(
        None, "follows global", follows="global_profiler.save_path", planned="profiling", path=True
    )
    relocate_results: bool = setting(
        False, "follows global", follows="global_profiler.relocate_results", planned="profiling"
    )
    finish_hook_cmd: str | None = setting(
        None, "follows global", follows="global_profiler.finish_hook_cmd", planned="profiling"
    )
    finish_hook_all_ranks: bool = setting(
        False, "follows global", follows="global_profiler.finish_hook_all_ranks", planned="profiling"
    )
    finish_hook_ranks: list = setting(
        [], "follows global", follows="global_profiler.finish_hook_ranks", planned="profiling"
    )
    tool_config: ProfilerToolConfigConfig = section(ProfilerToolConfigConfig)


@dataclass(frozen=True)
class GlobalProfilerGlobalToolNsysConfig(ConfigNode):
    """``global_profiler.global_tool_config.nsys``."""

    discrete: bool = setting(False, "one file per task", planned="profiling")
    controller_nsight_options: dict = setting({}, "nsys options of the controller", planned="profiling")
    worker_nsight_options: dict = setting({}, "nsys options of the workers", planned="profiling")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolTorchMemoryConfig(ConfigNode):
    """``global_profiler.global_tool_config.torch_memory``."""

    trace_alloc_max_entries: int = setting(100000, "snapshot size", planned="profiling")
    stack_depth: int = setting(32, "stack depth", planned="profiling")
    memory_snapshot_num_steps: int = setting(1, "steps per dump", planned="profiling")
    context: str = setting("all", "alloc, state, all", planned="profiling")
    stacks: str = setting("all", "python, cpp, all", planned="profiling")
    kw_args: dict = setting({}, "extra args", planned="profiling")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolPrecisionDebuggerConfig(ConfigNode):
    """``global_profiler.global_tool_config.precision_debugger``."""

    config_path: str | None = setting(None, "msprobe JSON", planned="profiling", path=True)
    steps: list | None = setting(None, "deprecated", planned="profiling")
    stages: list | None = setting(None, "stage names", planned="profiling")
    strict: bool = setting(False, "fail on unknown stage", planned="profiling")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolConfigConfig(ConfigNode):
    """``global_profiler.global_tool_config``."""

    nsys: GlobalProfilerGlobalToolNsysConfig = section(GlobalProfilerGlobalToolNsysConfig)
    torch_memory: GlobalProfilerGlobalToolTorchMemoryConfig = section(GlobalProfilerGlobalToolTorchMemoryConfig)
    precision_debugger: GlobalProfilerGlobalToolPrecisionDebuggerConfig = section(
        GlobalProfilerGlobalToolPrecisionDebuggerConfig
    )


@dataclass(frozen=True)
class GlobalProfilerConfig(ConfigNode):
    """Profiling of the whole run."""

    tool: str | None = setting(None, "nsys, npu, torch, torch_memory, precision_debugger", planned="profiling")
    steps: list | None = setting(None, "list of steps to profile", planned="profiling")
    profile_continuous_steps: bool = setting(False, "merge adjacent steps", planned="profiling")
    save_path: str = setting("outputs/profile", "output folder", planned="profiling", path=True)
    relocate_results: bool = setting(False, "move engine/nsys files into save_path", planned="profiling")
    finish_hook_cmd: str | None = setting(None, "shell command once at the end", planned="profiling")
    finish_hook_all_ranks: bool = setting(False, "run on all ranks", planned="profiling")
    finish_hook_ranks: list = setting([], "run on these ranks", planned="profiling")
    global_tool_config: GlobalProfilerGlobalToolConfigConfig = section(GlobalProfilerGlobalToolConfigConfig)
