"""Recordings of what a process computes in a step: by the torch profiler, CUDA's history of memory, Nsight Systems.

A trace opens in https://ui.perfetto.dev or chrome://tracing, a memory snapshot in https://pytorch.org/memory_viz. torch
records one trace at a time in a process, so colocated roles share the recording that the first of them began; ranges
named ``<role>/<method>`` separate them. With ``discrete`` every call of a role's method has a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from verl.config.schema.role import ProfilerConfig, ProfilerToolTorchConfig

FOLDER = "outputs/profile"
"""Where recordings go in programs without ``global_profiler.save_path``."""
_running: Recording | None = None


class Recording(Protocol):
    """What is being recorded in this process."""

    def mini_batch_done(self) -> None:
        """A mini-batch was trained; schedules count these."""

    def end(self) -> None:
        """Write what was recorded."""


class Trace:
    """A run of the torch profiler over all threads of the process, written to ``<path>.json.gz``.

    With ``schedule.active`` > 0 only those mini-batches are recorded, and every cycle has a number in its file's name.
    """

    def __init__(self, path: Path, settings: ProfilerToolTorchConfig):
        self._path, self._cycles, plan = path, 0, settings.schedule
        self._counts = plan.active > 0
        contents = set(settings.contents) or {"cpu", "cuda"}
        activities = [ProfilerActivity.CPU] if "cpu" in contents else []
        if "cuda" in contents and torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities or [ProfilerActivity.CPU],
            schedule=schedule(
                skip_first=plan.skip_first, wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=plan.repeat
            )
            if self._counts
            else None,
            on_trace_ready=self._write,
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
            # Samplers and agent loops compute in threads of their own.
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()

    def mini_batch_done(self) -> None:
        if self._counts:
            self._profile.step()

    def end(self) -> None:
        self._profile.stop()

    def _write(self, trace: profile) -> None:
        cycle = f"_cycle{self._cycles}" if self._counts else ""
        self._cycles += 1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(f"{self._path}{cycle}.json.gz")


class MemoryHistory:
    """CUDA's allocations and releases with their stacks, written to ``<path>.pickle`` by torch."""

    def __init__(self, path: Path, max_entries: int):
        self._path = path
        torch.cuda.memory._record_memory_history(max_entries=max_entries)

    def mini_batch_done(self) -> None:
        """It has no schedule."""

    def end(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(f"{self._path}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


class NsightCapture:
    """A stretch that Nsight Systems captures, if it has started this process with ``capture-range=cudaProfilerApi``."""

    def __init__(self) -> None:
        torch.cuda.profiler.start()

    def mini_batch_done(self) -> None:
        """It has no schedule."""

    def end(self) -> None:
        torch.cuda.profiler.stop()


class RoleProfiler:
    """Profiling of one role on one process.

    Args:
        role: its name in files and ranges.
        config: its section ``profiler``.
        rank: of this process in the role's group; rank 0 is recorded unless the section names others.

    Example:
        >>> profiler.begin("step_3")
        >>> with profiler.phase("update_actor"):
        ...     update()
        >>> profiler.end()  # wrote <save_path>/step_3/actor_rank0.json.gz
    """

    def __init__(self, role: str, config: ProfilerConfig, rank: int):
        self.role, self.config, self.rank = role, config, rank
        self._step: str | None = None
        self._calls = 0
        self._recording: Recording | None = None

    @property
    def records(self) -> bool:
        """Whether this role is profiled on this process."""
        config = self.config
        if not config.enable or config.tool is None:
            return False
        return config.all_ranks or self.rank in (config.ranks or [0])

    def begin(self, step: str) -> None:
        """Profile from here to `end`; ``step`` names the folder of what is written."""
        if not self.records:
            return
        self._step, self._calls = step, 0
        if not self._is_discrete:
            self._recording = self._begin(f"{self.role}_rank{self.rank}")

    def end(self) -> None:
        """Write the recording that `begin` began; nothing where none runs."""
        self._step = None
        if self._recording is not None:
            _end(self._recording)
            self._recording = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range of the recording that runs in this process, or a recording of its own."""
        recording = None
        if self._step is not None and self._is_discrete:
            recording = self._begin(f"{self.role}_{name}_{self._calls}_rank{self.rank}")
            self._calls += 1
        if _running is None:
            yield
            return
        try:
            with _range(f"{self.role}/{name}"):
                yield
        finally:
            if recording is not None:
                _end(recording)

    @property
    def _is_discrete(self) -> bool:
        tools = self.config.tool_config
        return {"torch": tools.torch.discrete, "nsys": tools.nsys.discrete}.get(str(self.config.tool), False)

    def _begin(self, name: str) -> Recording | None:
        """The recording of this process, unless one runs already."""
        global _running
        if _running is not None:
            return None
        path = Path(self.config.save_path or FOLDER) / str(self._step) / name
        tools = self.config.tool_config
        if self.config.tool == "torch":
            _running = Trace(path, tools.torch)
        elif self.config.tool == "nsys":
            _running = NsightCapture()
        else:
            _running = MemoryHistory(path, tools.torch_memory.trace_alloc_max_entries)
        return _running


class ProfiledSteps:
    """Which steps are profiled, and where recordings begin and end.

    Args:
        steps: their numbers.
        continuous: steps in a row share one recording.
    """

    def __init__(self, steps: list[int] | None, continuous: bool = False):
        self._steps, self._continuous = set(steps or ()), continuous

    def beginning(self, step: int) -> str | None:
        """The name of the recording that begins before this step, if one does."""
        if step not in self._steps or (self._continuous and step - 1 in self._steps):
            return None
        last = step
        while self._continuous and last + 1 in self._steps:
            last += 1
        return f"step_{step}" if last == step else f"step_{step}_to_{last}"

    def is_end(self, step: int) -> bool:
        """Whether a recording ends after this step."""
        return step in self._steps and not (self._continuous and step + 1 in self._steps)


def mini_batch_done() -> None:
    """Tell the recording of this process, if one runs, that a mini-batch was trained."""
    if _running is not None:
        _running.mini_batch_done()


def _range(name: str) -> AbstractContextManager[None]:
    """A named range of the recording that runs."""
    return torch.cuda.nvtx.range(name) if isinstance(_running, NsightCapture) else record_function(name)


def _end(recording: Recording) -> None:
    global _running
    _running = None
    recording.end()
