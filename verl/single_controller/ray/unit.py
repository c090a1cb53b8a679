"""`Unit`: one object over one or more processes that is started, watched and ended independently of every group.

Groups end with the first of their workers that dies. What may be replaced during a run is a unit: the death of
one says nothing of the others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.base.resources import ClassWithInitArgs
from verl.single_controller.ray.class_with_args import RayClassWithInitArgs
from verl.single_controller.ray.fleet import Member
from verl.single_controller.ray.handle import RayHandle
from verl.single_controller.ray.launch import LaunchPlan, launch
from verl.single_controller.ray.resource_pool import ProcessSlot
from verl.stacks import Process, state_of

KILL_SECONDS = 10.0
"""How long another node may take to end a process."""


class Unit:
    """Started by its constructor, which waits until every process has built its object.

    Args:
        class_with_init: what each process builds; the objects know their rank among the processes.
        name: for messages and logs.
        slots: a place for each process.
        share: part of a slot's device that a process takes.
        seed: the run's.
        register_seconds: how long the processes may take to come up.

    Raises:
        WorkerError: they did not come up.
        Exception: what a constructor raised.
    """

    def __init__(
        self,
        class_with_init: ClassWithInitArgs,
        name: str,
        slots: Sequence[ProcessSlot],
        share: float,
        seed: int,
        register_seconds: float,
    ):
        plan = LaunchPlan(
            role=name,
            class_with_init=RayClassWithInitArgs.of(class_with_init),
            seed=seed,
            share=share,
            register_seconds=register_seconds,
            behind_handle=True,
        )
        fleet, _ = launch(plan, slots)
        if len(slots) == 1:
            fleet.members = [replace(fleet.members[0], name=name)]
        self.name, self._fleet, self._title = name, fleet, f"ray::{class_with_init.cls.__name__}"
        self.handles = [RayHandle(member.actor, "", member.name, None, fleet) for member in fleet.members]
        fleet.watch()

    @property
    def handle(self) -> RayHandle:
        """The first process's."""
        return self.handles[0]

    @property
    def members(self) -> list[Member]:
        return self._fleet.members

    @property
    def death(self) -> str:
        """Which process died and what it wrote last; empty while all live."""
        return self._fleet.death_report

    async def call_all(self, method: Callable[..., Any]) -> None:
        """Run a method in every process, at once."""
        await asyncio.gather(*(handle.call(method) for handle in self.handles))

    def look_at(self) -> list[Process]:
        """State and stacks of the processes."""
        return self._fleet.look_at()

    def close(self) -> None:
        """End the processes, also those that no longer answer, and wait until they are gone."""
        self._fleet.close()
        for member in self._fleet.members:
            _kill(member, self._title)


def _kill(member: Member, title: str) -> None:
    """Ray asks a process to end, and one that is stopped does not hear it."""
    if _is_here(member):
        end_process(member.pid, title)
        return
    there = NodeAffinitySchedulingStrategy(member.node_id, soft=False)
    call: Any = ray.remote(end_process).options(num_cpus=0, scheduling_strategy=there).remote
    with suppress(RayError):  # the node is gone, and the process with it
        ray.get(call(member.pid, title), timeout=KILL_SECONDS)


def _is_here(member: Member) -> bool:
    """Whether a worker lives on this machine, where one may have several of Ray's nodes."""
    context = ray.get_runtime_context()
    return member.node_id == context.get_node_id() or member.address == ray.util.get_node_ip_address()


def end_process(pid: int, title: str) -> None:
    """End a process of this machine and wait until it is gone; one that goes by another title is let be.

    Args:
        title: what Ray calls the process, whose PID another process may have by now.
    """
    end = time.monotonic() + KILL_SECONDS
    if _runs(pid, title):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while time.monotonic() < end and _runs(pid, title):
        time.sleep(0.02)


def _runs(pid: int, title: str) -> bool:
    with suppress(OSError):
        called = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        return called.startswith(title) and state_of(pid) not in ("Z", "X", "")
    return False
