"""Worker processes on Ray that are handed from run to run, so that each run does not load torch anew.

A run reserves its pools, gets real processes beside these reservations, joins process groups and builds its workers in
them. Two things are not as usual: what a process has loaded stays loaded, and plain workers live behind the event loop
that workers with async methods have.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.util.placement_group import remove_placement_group

from verl.single_controller.ray import fleet, host, launch, resource_pool, runtime

RENEW_SECONDS = 30.0
"""How long a process may take to leave its groups; one that hangs in a collective is killed."""


class KeptHost(host.AsyncWorkerHost):
    """A worker's process that can be emptied for another worker."""

    async def leave(self) -> None:
        """Let go of the worker and of every process group, behind whatever still runs."""
        await self._in(self._order, self._empty)

    async def renew(self, *arguments: Any, **further: Any) -> None:
        """What a new process is told."""
        self.__init__(*arguments, **further)  # type: ignore[misc]

    def _empty(self) -> None:
        from verl import distributed
        from verl.metrics import reset_notices

        self._place = None
        if "megatron.core" in sys.modules:
            from verl.engines.megatron.parallel import leave

            leave()
        gc.collect()
        distributed.leave_group()
        reset_notices()


class Kept:
    """The processes of a cluster of one node; of those that nobody uses the reference of their leaving."""

    def __init__(self) -> None:
        self._idle: list[tuple[Any, Any]] = []
        self._ours: set[Any] = set()
        self.given: list[str] = []
        self.reserved: list[Any] = []
        self.started = 0

    def give(self, recipe: launch.LaunchPlan, rank: int, slot: resource_pool.ProcessSlot | None) -> Any:
        """A process as `launch._actor` gives a new one."""
        name = launch.worker_names(recipe.role, rank + 1)[rank]
        self.given.append(name)
        place = (name, launch._environment(recipe), [*sys.path], os.getcwd())
        while self._idle:
            actor, left = self._idle.pop(0)
            if ray.wait([left], timeout=RENEW_SECONDS)[0]:
                ray.get(actor.renew.remote(*place, num_threads=recipe.num_threads))
                return actor
            _kill(actor)
        options = {"num_cpus": 0, "max_concurrency": launch.MAX_REQUESTS}
        actor: Any = ray.remote(KeptHost).options(**options).remote(*place, num_threads=recipe.num_threads)
        self._ours.add(actor)
        self.started += 1
        return actor

    def take(self, actor: Any, no_restart: bool = True) -> None:
        """Instead of an end."""
        if actor in self._ours:
            self._idle.append((actor, actor.leave.remote()))
        else:
            _kill(actor, no_restart=no_restart)

    def end_of_run(self, timeline_json_file: str | None = None) -> None:
        """The run's groups and reservations end; the cluster and the processes stay."""
        fleet.close_all()
        while self.reserved:
            remove_placement_group(self.reserved.pop())


_kill = ray.kill


@contextlib.contextmanager
def kept_processes(largest: int) -> Iterator[Kept]:
    """Inside, runs on Ray share the processes of one cluster, which has room for ``largest``."""
    kept, reserve = Kept(), resource_pool._reserve

    def noted(*arguments: Any) -> Any:
        made = reserve(*arguments)
        kept.reserved.extend(made)
        return made

    runtime.start_cluster([largest], ray_init={"address": "local"})
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "_actor", kept.give)
            patch.setattr(launch.LaunchPlan, "concurrent", True)
            patch.setattr(ray, "kill", kept.take)
            patch.setattr(resource_pool, "_reserve", noted)
            patch.setattr(runtime, "stop_cluster", kept.end_of_run)
            try:
                yield kept
            finally:
                kept.end_of_run()
    finally:
        runtime.stop_cluster()
