"""Profiler settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting

TOOLS = ("torch", "torch_memory", "nsys", "npu", "precision_debugger")
_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack")
_AFTER = "commands and files of engines after profiling"
_MEMORY = "options of torch's history of memory"


@dataclass(frozen=True)
class ProfilerToolNsysConfig(ConfigNode):
    """Nsight Systems."""

    discrete: bool | None = setting(
        None,
        "one file per task",
        follows="global_profiler.global_tool_config.nsys.discrete",
        planned="profiling with Nsight Systems",
    )


@dataclass(frozen=True)
class ProfilerToolNpuConfig(ConfigNode):
    """The Ascend profiler."""

    contents: list = setting(
        [], "what is recorded: npu, cpu, memory, shapes, module, stack", planned="profiling on Ascend"
    )
    level: str = setting("level0", "level_none, level0, level1 or level2", planned="profiling on Ascend")
    analysis: bool = setting(True, "evaluate the recording afterwards", planned="profiling on Ascend")
    discrete: bool = setting(False, "one file per task", planned="profiling on Ascend")


@dataclass(frozen=True)
class ProfilerToolTorchScheduleConfig(ConfigNode):
    """Which mini-batches the torch profiler records."""

    skip_first: int = setting(0, "mini-batches to skip")
    wait: int = setting(0, "mini-batches to wait")
    warmup: int = setting(0, "mini-batches to warm up")
    active: int = setting(0, "mini-batches to record; 0: the whole step, without a schedule")
    repeat: int = setting(0, "how often this is repeated; 0: to the end of the step")


@dataclass(frozen=True)
class ProfilerToolTorchConfig(ConfigNode):
    """The torch profiler."""

    contents: list = setting(
        [], "what is recorded: cpu, cuda, memory, shapes, stack; empty: cpu and cuda", choices=_CONTENTS
    )
    discrete: bool = setting(False, "a file for every call of a role's method, instead of one for the step")
    schedule: ProfilerToolTorchScheduleConfig = section(ProfilerToolTorchScheduleConfig)


@dataclass(frozen=True)
class ProfilerToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(
        100000,
        "allocations that are remembered",
        follows="global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
    )
    stack_depth: int = setting(
        32,
        "depth of stacks",
        follows="global_profiler.global_tool_config.torch_memory.stack_depth",
        planned=_MEMORY,
    )
    memory_snapshot_num_steps: int = setting(
        1,
        "steps per snapshot",
        follows="global_profiler.global_tool_config.torch_memory.memory_snapshot_num_steps",
        planned=_MEMORY,
    )


@dataclass(frozen=True)
class ProfilerToolPrecisionDebuggerConfig(ConfigNode):
    """The msprobe precision debugger."""

    config_path: str | None = setting(
        None,
        "JSON file of msprobe",
        follows="global_profiler.global_tool_config.precision_debugger.config_path",
        planned="the msprobe precision debugger",
        path=True,
    )
    steps: list | None = setting(None, "older form of global_profiler.steps", planned="the msprobe precision debugger")
    stages: list | None = setting(
        None,
        "stages to look at",
        follows="global_profiler.global_tool_config.precision_debugger.stages",
        planned="the msprobe precision debugger",
    )
    strict: bool = setting(
        False,
        "stop on a stage that does not exist",
        follows="global_profiler.global_tool_config.precision_debugger.strict",
        planned="the msprobe precision debugger",
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

    tool: str | None = setting(None, "tool of this role", follows="global_profiler.tool", choices=TOOLS)
    enable: bool = setting(False, "profile this role")
    all_ranks: bool = setting(False, "profile every process of this role")
    ranks: list = setting([], "ranks of the processes to profile; empty: rank 0")
    save_path: str | None = setting(None, "folder of the results", follows="global_profiler.save_path", path=True)
    relocate_results: bool = setting(
        False, "move the engines' own files there", follows="global_profiler.relocate_results", planned=_AFTER
    )
    finish_hook_cmd: str | None = setting(
        None, "shell command to run at the end", follows="global_profiler.finish_hook_cmd", planned=_AFTER
    )
    finish_hook_all_ranks: bool = setting(
        False, "run it on every process", follows="global_profiler.finish_hook_all_ranks", planned=_AFTER
    )
    finish_hook_ranks: list = setting(
        [], "processes that run it", follows="global_profiler.finish_hook_ranks", planned=_AFTER
    )
    tool_config: ProfilerToolConfigConfig = section(ProfilerToolConfigConfig)


@dataclass(frozen=True)
class GlobalProfilerGlobalToolNsysConfig(ConfigNode):
    """Nsight Systems."""

    discrete: bool = setting(False, "one file per task", planned="profiling with Nsight Systems")
    controller_nsight_options: dict = setting(
        {}, "options of nsys for the controller", planned="profiling with Nsight Systems"
    )
    worker_nsight_options: dict = setting({}, "options of nsys for workers", planned="profiling with Nsight Systems")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(100000, "allocations that are remembered")
    stack_depth: int = setting(32, "depth of stacks", planned=_MEMORY)
    memory_snapshot_num_steps: int = setting(1, "steps per snapshot", planned=_MEMORY)
    context: str = setting("all", "alloc, state or all", planned=_MEMORY)
    stacks: str = setting("all", "python, cpp or all", planned=_MEMORY)
    kw_args: dict = setting({}, "further arguments", planned=_MEMORY)


@dataclass(frozen=True)
class GlobalProfilerGlobalToolPrecisionDebuggerConfig(ConfigNode):
    """The msprobe precision debugger."""

    config_path: str | None = setting(None, "JSON file of msprobe", planned="the msprobe precision debugger", path=True)
    steps: list | None = setting(None, "older form of global_profiler.steps", planned="the msprobe precision debugger")
    stages: list | None = setting(None, "stages to look at", planned="the msprobe precision debugger")
    strict: bool = setting(False, "stop on a stage that does not exist", planned="the msprobe precision debugger")


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

    tool: str | None = setting(None, "torch: traces; torch_memory: CUDA's allocations; null: none", choices=TOOLS)
    steps: list | None = setting(None, "numbers of the steps to profile")
    profile_continuous_steps: bool = setting(False, "one recording for steps in a row")
    save_path: str = setting("outputs/profile", "folder of the results", path=True)
    relocate_results: bool = setting(False, "move the engines' own files there", planned=_AFTER)
    finish_hook_cmd: str | None = setting(None, "shell command to run at the end", planned=_AFTER)
    finish_hook_all_ranks: bool = setting(False, "run it on every process", planned=_AFTER)
    finish_hook_ranks: list = setting([], "processes that run it", planned=_AFTER)
    global_tool_config: GlobalProfilerGlobalToolConfigConfig = section(GlobalProfilerGlobalToolConfigConfig)
