"""Profiler settings."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ConfigNode, section, setting

TOOLS = ("torch", "torch_memory", "nsys", "npu", "precision_debugger")
_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack")


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
    discrete: bool = setting(False, "write one file per method call instead of one per step")
    schedule: ProfilerToolTorchScheduleConfig = section(ProfilerToolTorchScheduleConfig)


@dataclass(frozen=True)
class ProfilerToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(
        100000,
        "maximum number of recorded allocations",
        follows="global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
    )


@dataclass(frozen=True)
class ProfilerToolNsysConfig(ConfigNode):
    """Nsight Systems."""

    discrete: bool = setting(
        False,
        "capture every call of this role's methods alone",
        follows="global_profiler.global_tool_config.nsys.discrete",
    )


@dataclass(frozen=True)
class ProfilerToolConfigConfig(ConfigNode):
    """Settings of the tools."""

    nsys: ProfilerToolNsysConfig = section(ProfilerToolNsysConfig)
    torch: ProfilerToolTorchConfig = section(ProfilerToolTorchConfig)
    torch_memory: ProfilerToolTorchMemoryConfig = section(ProfilerToolTorchMemoryConfig)


@dataclass(frozen=True)
class ProfilerConfig(ConfigNode):
    """Profiling of one role."""

    tool: str | None = setting(None, "tool of this role", follows="global_profiler.tool", choices=TOOLS)
    enable: bool = setting(False, "profile this role")
    all_ranks: bool = setting(False, "profile every process of this role")
    ranks: list = setting([], "ranks of the processes to profile; empty: rank 0")
    save_path: str | None = setting(None, "folder of the results", follows="global_profiler.save_path", path=True)
    tool_config: ProfilerToolConfigConfig = section(ProfilerToolConfigConfig)


@dataclass(frozen=True)
class GlobalProfilerGlobalToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(100000, "maximum number of recorded allocations")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolNsysConfig(ConfigNode):
    """Nsight Systems, which Ray starts around every worker process."""

    discrete: bool = setting(False, "capture every call of a role's methods alone instead of whole steps")
    controller_nsight_options: dict = setting(
        {},
        "options of nsys for the controller",
        no_effect="the controller is the program itself: start it with `nsys profile`",
    )
    worker_nsight_options: dict = setting(
        {},
        "options of nsys for the workers, on top of trace=cuda,nvtx,cublas,ucx, "
        "cuda-memory-usage=true, cuda-graph-trace=graph, capture-range=cudaProfilerApi, kill=none and "
        "capture-range-end=repeat-shutdown:n, n = 6 times the number of steps",
    )


@dataclass(frozen=True)
class GlobalProfilerGlobalToolConfigConfig(ConfigNode):
    """Settings of the tools; the default of every role."""

    nsys: GlobalProfilerGlobalToolNsysConfig = section(GlobalProfilerGlobalToolNsysConfig)
    torch_memory: GlobalProfilerGlobalToolTorchMemoryConfig = section(GlobalProfilerGlobalToolTorchMemoryConfig)


@dataclass(frozen=True)
class GlobalProfilerConfig(ConfigNode):
    """Profiling of the whole run."""

    tool: str | None = setting(
        None,
        "torch: traces; torch_memory: CUDA's allocations; nsys: Nsight Systems, by Ray; null: none",
        choices=TOOLS,
    )
    steps: list | None = setting(None, "step numbers to profile")
    profile_continuous_steps: bool = setting(False, "record consecutive steps into one file")
    save_path: str = setting("outputs/profile", "folder of the results", path=True)
    global_tool_config: GlobalProfilerGlobalToolConfigConfig = section(GlobalProfilerGlobalToolConfigConfig)
