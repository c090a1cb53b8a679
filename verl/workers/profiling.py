"""Workers whose methods can be profiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from verl.config import ProfilerConfig
from verl.observability.profiler import RoleProfiler
from verl.single_controller.base import Dispatch, Worker, register

P = ParamSpec("P")
R = TypeVar("R")


class ProfiledWorker(Worker):
    """A worker of which some methods are marked by `profiled`; the controller says which steps are recorded."""

    def profiler_configs(self) -> Mapping[str, ProfilerConfig]:
        """The section ``profiler`` of each role that this worker plays; a role without one is not profiled."""
        return {}

    @functools.cached_property
    def profilers(self) -> dict[str, RoleProfiler]:
        return {role: RoleProfiler(role, config, self.rank) for role, config in self.profiler_configs().items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, step: str) -> None:
        """Record what follows, on the processes and for the roles that are chosen, under the name ``step``."""
        for profiler in self.profilers.values():
            profiler.begin(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """Write what was recorded."""
        for profiler in self.profilers.values():
            profiler.end()


def profiled(role: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a worker's method as a phase of ``role``. Stands below `register`."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            worker: Any = args[0]
            profiler = worker.profilers.get(role)
            if profiler is None:
                return method(*args, **kwargs)
            with profiler.phase(method.__name__):
                return method(*args, **kwargs)

        return run

    return decorate
