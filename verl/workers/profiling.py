"""Workers whose methods can be profiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from verl.config import ProfilerConfig
from verl.observability.profiler import RoleProfiler
from verl.single_controller.base import Dispatch, Worker, register

P = ParamSpec("P")
R = TypeVar("R")


class ProfiledWorker(Worker):
    """A worker of which some methods are marked by `profiled`; the controller says which steps are recorded."""

    def profiling(self) -> tuple[str, ProfilerConfig | None]:
        """The name of this worker's role and its section ``profiler``; without one it is not profiled."""
        return "", None

    @functools.cached_property
    def profiler(self) -> RoleProfiler | None:
        role, config = self.profiling()
        return None if config is None else RoleProfiler(role, config, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, step: str) -> None:
        """Start recording under the name ``step``, if this process is selected."""
        if self.profiler is not None:
            self.profiler.begin(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """Write what was recorded."""
        if self.profiler is not None:
            self.profiler.end()


def profiled(method: Callable[P, R]) -> Callable[P, R]:
    """Marks a worker's method as a phase of its role. Place it below `register`."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        worker: Any = args[0]
        if worker.profiler is None:
            return method(*args, **kwargs)
        with worker.profiler.phase(method.__name__):
            return method(*args, **kwargs)

    return run
