"""Profiler settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class ProfilerToolNsysConfig(ConfigNode):
    """Nsight Systems."""

    discrete: bool | None = setting(
        None, "one file per task", follows="global_profiler.global_tool_config.nsys.discrete", planned="profiling"
    )


@dataclass(frozen=True)
class ProfilerToolNpuConfig(ConfigNode):
    """The Ascend profiler."""

    contents: list = setting([], "what is recorded: npu, cpu, memory, shapes, module, stack", planned="profiling")
    level: str = setting("level0", "level_none, level0, level1 or level2", planned="profiling")
    analysis: bool = setting(True, "evaluate the recording afterwards", planned="profiling")
    discrete: bool = setting(False, "one file per task", planned="profiling")


@dataclass(frozen=True)
class ProfilerToolTorchScheduleConfig(ConfigNode):
    """Which mini-batches the torch profiler records."""

    skip_first: int = setting(0, "mini-batches to skip", planned="profiling")
    wait: int = setting(0, "mini-batches to wait", planned="profiling")
    warmup: int = setting(0, "mini-batches to warm up", planned="profiling")
    active: int = setting(0, "mini-batches to record; 0: all", planned="profiling")
    repeat: int = setting(0, "how often this is repeated", planned="profiling")


@dataclass(frozen=True)
class ProfilerToolTorchConfig(ConfigNode):
    """The torch profiler."""

    contents: list = setting([], "what is recorded: cuda, cpu, memory, shapes, stack", planned="profiling")
    discrete: bool = setting(False, "one file per task", planned="profiling")
    schedule: ProfilerToolTorchScheduleConfig = section(ProfilerToolTorchScheduleConfig)


@dataclass(frozen=True)
class ProfilerToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(
        100000,
        "allocations that are remembered",
        follows="global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
        planned="profiling",
    )
    stack_depth: int = setting(
        32,
        "depth of stacks",
        follows="global_profiler.global_tool_config.torch_memory.stack_depth",
        planned="profiling",
    )
    memory_snapshot_num_steps: int = setting(
        1,
        "steps per snapshot",
        follows="global_profiler.global_tool_config.torch_memory.memory_snapshot_num_steps",
        planned="profiling",
    )


@dataclass(frozen=True)
class ProfilerToolPrecisionDebuggerConfig(ConfigNode):
    """The msprobe precision debugger."""

    config_path: str | None = setting(
        None,
        "JSON file of msprobe",
        follows="global_profiler.global_tool_config.precision_debugger.config_path",
        planned="profiling",
        path=True,
    )
    steps: list | None = setting(None, "older form of global_profiler.steps", planned="profiling")
    stages: list | None = setting(
        None,
        "stages to look at",
        follows="global_profiler.global_tool_config.precision_debugger.stages",
        planned="profiling",
    )
    strict: bool = setting(
        False,
        "stop on a stage that does not exist",
        follows="global_profiler.global_tool_config.precision_debugger.strict",
        planned="profiling",
    )


@dataclass(frozen=True)
class ProfilerToolConfigConfig(ConfigNode):
    """Settings of the tools."""

    nsys: ProfilerToolNsysConfig = section(ProfilerToolNsysConfig)
    npu: ProfilerToolNpuConfig = section(ProfilerToolNpuConfig)
    torch: ProfilerToolTorchConfig = section(ProfilerToolTorchConfig)
    torch_memory: ProfilerToolTorchMemoryConfig = section(ProfilerToolTorchMemoryConfig)
    precision_debugger: ProfilerToolPrecisionDebuggerConfig = section(ProfilerToolPrecisionDebuggerConfig)


@dataclass(frozen=True)
class ProfilerConfig(ConfigNode):
    """Profiling of one role."""

    tool: str | None = setting(None, "tool of this role", follows="global_profiler.tool", planned="profiling")
    enable: bool = setting(False, "profile this role", planned="profiling")
    all_ranks: bool = setting(False, "profile every process", planned="profiling")
    ranks: list = setting([], "processes to profile", planned="profiling")
    save_path: str | None = setting(
        None, "folder of the results", follows="global_profiler.save_path", planned="profiling", path=True
    )
    relocate_results: bool = setting(
        False, "move the engines' own files there", follows="global_profiler.relocate_results", planned="profiling"
    )
    finish_hook_cmd: str | None = setting(
        None, "shell command to run at the end", follows="global_profiler.finish_hook_cmd", planned="profiling"
    )
    finish_hook_all_ranks: bool = setting(
        False, "run it on every process", follows="global_profiler.finish_hook_all_ranks", planned="profiling"
    )
    finish_hook_ranks: list = setting(
        [], "processes that run it", follows="global_profiler.finish_hook_ranks", planned="profiling"
    )
    tool_config: ProfilerToolConfigConfig = section(ProfilerToolConfigConfig)


@dataclass(frozen=True)
class GlobalProfilerGlobalToolNsysConfig(ConfigNode):
    """Nsight Systems."""

    discrete: bool = setting(False, "one file per task", planned="profiling")
    controller_nsight_options: dict = setting({}, "options of nsys for the controller", planned="profiling")
    worker_nsight_options: dict = setting({}, "options of nsys for workers", planned="profiling")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(100000, "allocations that are remembered", planned="profiling")
    stack_depth: int = setting(32, "depth of stacks", planned="profiling")
    memory_snapshot_num_steps: int = setting(1, "steps per snapshot", planned="profiling")
    context: str = setting("all", "alloc, state or all", planned="profiling")
    stacks: str = setting("all", "python, cpp or all", planned="profiling")
    kw_args: dict = setting({}, "further arguments", planned="profiling")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolPrecisionDebuggerConfig(ConfigNode):
    """The msprobe precision debugger."""

    config_path: str | None = setting(None, "JSON file of msprobe", planned="profiling", path=True)
    steps: list | None = setting(None, "older form of global_profiler.steps", planned="profiling")
    stages: list | None = setting(None, "stages to look at", planned="profiling")
    strict: bool = setting(False, "stop on a stage that does not exist", planned="profiling")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolConfigConfig(ConfigNode):
    """Settings of the tools, which those of a role follow."""

    nsys: GlobalProfilerGlobalToolNsysConfig = section(GlobalProfilerGlobalToolNsysConfig)
    torch_memory: GlobalProfilerGlobalToolTorchMemoryConfig = section(GlobalProfilerGlobalToolTorchMemoryConfig)
    precision_debugger: GlobalProfilerGlobalToolPrecisionDebuggerConfig = section(
        GlobalProfilerGlobalToolPrecisionDebuggerConfig
    )


@dataclass(frozen=True)
class GlobalProfilerConfig(ConfigNode):
    """Profiling of the whole run."""

    tool: str | None = setting(
        None, "nsys, npu, torch, torch_memory or precision_debugger; null: none", planned="profiling"
    )
    steps: list | None = setting(None, "steps to profile", planned="profiling")
    profile_continuous_steps: bool = setting(False, "one recording for steps in a row", planned="profiling")
    save_path: str = setting("outputs/profile", "folder of the results", planned="profiling", path=True)
    relocate_results: bool = setting(False, "move the engines' own files there", planned="profiling")
    finish_hook_cmd: str | None = setting(None, "shell command to run at the end", planned="profiling")
    finish_hook_all_ranks: bool = setting(False, "run it on every process", planned="profiling")
    finish_hook_ranks: list = setting([], "processes that run it", planned="profiling")
    global_tool_config: GlobalProfilerGlobalToolConfigConfig = section(GlobalProfilerGlobalToolConfigConfig)
