"""The processes of one group: who they are, whether they live, and what happens when one dies.

All groups over the same processes (a colocated group and what it spawned) share one fleet. A death is noticed by the
call that waits for the dead worker or, between calls, by a thread that asks every worker for a sign of life; a busy
worker need not give one, for a dead one Ray answers in its place. Then the other workers are stopped: in a collective
they would wait for ever.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.errors import WorkerError
from verl.single_controller.ray.failures import first_sentences, register_death_reporter
from verl.stacks import Process, look_at

LOG_LINES, LOG_BYTES, LOG_SECONDS = 25, 64 << 10, 10.0
ANSWER_SECONDS = 0.2
ABSENCE_SECONDS = 30.0
"""How long to ask after a worker to which the connection broke; Ray takes some seconds to call a node dead."""
UNFINISHED_SECONDS = 5.0
"""How long the workers that did not fail may take to end a call before the next one is refused."""
_ADVICE = {
    "Segmentation fault": "A worker that writes into a tensor which arrived by Ray must clone it first.",
    "MemoryError": "It ran out of memory: fewer processes per node or smaller micro-batches help.",
}
log = logging.getLogger("verl")


@dataclass(frozen=True)
class Member:
    """One worker's process.

    Args:
        name: for people, for instance ``critic[1]``.
        actor: Ray's handle.
        node_id, address: its node.
        pid: its number there.
        logs: files of its standard output and error on that node.
    """

    name: str
    actor: Any
    node_id: str
    address: str
    pid: int
    logs: tuple[str, ...] = ()

    @property
    def actor_id(self) -> str:
        return self.actor._actor_id.hex()


class Fleet:
    """The processes of a group, in the order of their ranks."""

    def __init__(self, name: str, members: Sequence[Member]):
        self.name, self.members = name, list(members)
        self._cluster = ray.get_runtime_context().gcs_address
        self._lock = threading.Lock()  # callers and the thread that watches: who writes the death report, and closing
        self._death_report: str | None = None
        self._closed = False
        self._unfinished: list[Any] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Threads of this process that call these workers, under whatever role: a call is numbered and sent to all of
        # its workers in one go, so that they run the calls of all roles in one order and meet in their collectives.
        self.caller_id, self.sending = uuid.uuid4().hex, threading.Lock()
        self.sent = [0] * len(self.members)
        self.helpers: list[Fleet] = []
        """Processes that only serve these ones, and end with them."""
        for member in self.members:
            register_death_reporter(member.actor_id, self)
        _living.add(self)

    # ---- signs of life -----------------------------------------------------------------------------------------

    def watch(self, every_n_seconds: float = 1.0) -> None:
        """Look after the workers from a background thread; the thread ends with the fleet."""
        if self._thread is None and not self._closed:
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=_watch, args=(ref(self), self._stop, every_n_seconds), name=f"verl-{self.name}", daemon=True
            )
            self._thread.start()

    def stop_watching(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def is_connected(self) -> bool:
        """Whether this process is still connected to the cluster in which the workers live."""
        return ray.is_initialized() and ray.get_runtime_context().gcs_address == self._cluster

    def is_alive(self, member: Member) -> bool:
        """Ask one worker; a busy one counts as alive."""
        return _death_of(member.actor.ping.remote(), ANSWER_SECONDS) is None

    def check(self) -> None:
        """Raise `WorkerError` if a worker died or the group was closed."""
        if self._death_report is not None:
            raise WorkerError(self._death_report)
        if self._closed:
            raise WorkerError(f"the workers of {self.name!r} were stopped", fix="Build the group again.")
        if self._unfinished:
            _, self._unfinished = ray.wait(
                self._unfinished, num_returns=len(self._unfinished), timeout=UNFINISHED_SECONDS
            )
        if self._unfinished:
            raise WorkerError(
                f"{len(self._unfinished)} worker(s) of {self.name!r} never came back from the call that failed",
                fix="They may wait in a collective for the worker that failed. Close the group and build it again.",
            )

    @property
    def death_report(self) -> str:
        """Who died, and what it wrote last; empty while all live."""
        return self._death_report or ""

    def remember_unfinished(self, references: Sequence[Any]) -> None:
        """After a failed call: what has to come back before the next one."""
        if self._death_report is None and not self._closed:
            unique = list(dict.fromkeys(references))
            self._unfinished = ray.wait(unique, num_returns=len(unique), timeout=0)[1]

    def explain_death(self, actor_id: str, reason: str) -> WorkerError:
        """The error for a worker that died; the first death is the one that is reported, and ends the group.

        A worker whose pool was closed did not die, it was stopped.
        """
        with self._lock:
            if self._death_report is None and not self._closed:
                self._stop_members(besides=actor_id)
                self._closed = "placement group was removed" in reason
                if not self._closed:
                    dead = next(m for m in self.members if m.actor_id == actor_id)
                    self._death_report = _death_report(dead, reason, is_alone=len(self.members) == 1)
                    log.error("%s", self._death_report)
        return WorkerError(self._death_report or f"the workers of {self.name!r} were stopped during this call")

    def explain_absence(self, actor_id: str, reason: str) -> WorkerError:
        """The error for a worker to which the connection broke: it died with its node, or the network failed."""
        member = next(m for m in self.members if m.actor_id == actor_id)
        deadline = time.monotonic() + ABSENCE_SECONDS
        while time.monotonic() < deadline:
            question = member.actor.ping.remote()
            death = _death_of(question, ANSWER_SECONDS)
            if death is not None:
                return self.explain_death(actor_id, str(death))
            if _answered(question):
                return WorkerError(
                    f"the connection to the worker {member.name} broke during this call and its result is lost",
                    fix="The worker lives; whether it finished the call is not known.",
                )
            time.sleep(ANSWER_SECONDS)
        return self.explain_death(actor_id, f"Its node cannot be reached: {reason}")

    def look_at(self) -> list[Process]:
        """State and stacks of all processes, also of those that serve these; each node looks at its own."""
        nodes: dict[str, list[Member]] = {}
        for member in [*self.members, *(helper for fleet in self.helpers for helper in fleet.members)]:
            nodes.setdefault(member.node_id, []).append(member)
        return [process for members in nodes.values() for process in _look_at(members)]

    def close(self) -> None:
        """Stop all workers; calls in flight fail."""
        self.stop_watching()
        with self._lock:
            alive = self._death_report is None and not self._closed and self.is_connected()
            self._closed = True
            if alive:
                self._stop_members()

    def _stop_members(self, besides: str = "") -> None:
        for member in self.members:
            if member.actor_id != besides:
                ray.kill(member.actor, no_restart=True)
        for fleet in self.helpers:
            fleet.close()


_living: WeakSet[Fleet] = WeakSet()


def close_all() -> None:
    """Stop the workers of every group of this process."""
    for fleet in list(_living):
        fleet.close()


def _stop_all_watching() -> None:
    for fleet in list(_living):
        fleet.stop_watching()


atexit.register(_stop_all_watching)  # before Ray's own exit hook: a ping to a cluster that is gone would hang


def _watch(fleet_ref: ref[Fleet], stop: threading.Event, every_n_seconds: float) -> None:
    pings: dict[str, Any] = {}
    while not stop.wait(every_n_seconds):
        fleet = fleet_ref()
        if fleet is None or not fleet.is_connected():
            return
        for member in fleet.members:
            ping = pings.setdefault(member.actor_id, None) or member.actor.ping.remote()
            pings[member.actor_id] = ping
            death = _death_of(ping)
            if death is not None:
                fleet.explain_death(member.actor_id, str(death))
                return
            if ray.wait([ping], timeout=0)[0]:
                pings[member.actor_id] = None  # answered, or not delivered: ping again
        del fleet


def _death_of(ping: Any, seconds: float = 0.0) -> RayError | None:
    """Why a ping will never be answered; None while it may be."""
    if not ray.wait([ping], timeout=seconds)[0]:
        return None
    try:
        ray.get(ping)
    except ActorUnavailableError:
        return None
    except RayActorError as death:
        return death
    return None


def _answered(ping: Any) -> bool:
    """Whether the worker itself answered."""
    try:
        ray.get(ping, timeout=0)
    except RayError:
        return False
    return True


def _death_report(member: Member, reason: str, is_alone: bool) -> str:
    lines = _last_lines(member)
    last_output = "".join(f"\n    {line}" for line in lines) or " nothing."
    advice = [text for sign, text in _ADVICE.items() if any(sign in line for line in lines)]
    return " ".join(
        [
            f"the worker {member.name} died (process {member.pid} on node {member.address}, {member.node_id[:8]}).",
            first_sentences(reason),
            *advice,
            *([] if is_alone else ["The other workers of its group were stopped."]),
            f"It wrote last:{last_output}",
        ]
    )


def _last_lines(member: Member) -> list[str]:
    """The end of a worker's log, read on its node."""
    if member.node_id == ray.get_runtime_context().get_node_id():
        return read_tail(member.logs)
    there = NodeAffinitySchedulingStrategy(member.node_id, soft=False)
    question = ray.remote(read_tail).options(num_cpus=0, scheduling_strategy=there).remote(member.logs)
    try:
        return ray.get(question, timeout=LOG_SECONDS)
    except RayError as error:
        return [f"(its node does not answer: {type(error).__name__})"]


def _look_at(members: Sequence[Member]) -> list[Process]:
    """The processes of one node."""
    node, names = members[0], {member.pid: member.name for member in members}
    if node.node_id == ray.get_runtime_context().get_node_id():
        return look_at(names, names)
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    look = ray.remote(look_at).options(num_cpus=0, scheduling_strategy=there)
    question: Any = look.remote
    try:
        return ray.get(question(list(names), names, node.address), timeout=LOG_SECONDS)
    except RayError:
        return [Process(pid, name, "", node=node.address) for pid, name in names.items()]


def read_tail(files: Sequence[str], lines: int = LOG_LINES) -> list[str]:
    """The last lines of each file, in the order of the files."""
    tail: list[str] = []
    for file in files:
        if Path(file).is_file():
            with open(file, "rb") as text:
                text.seek(max(0, Path(file).stat().st_size - LOG_BYTES))
                end = text.read(LOG_BYTES).decode(errors="replace")
            tail += [line.rstrip() for line in end.splitlines()[-lines:] if line.strip()]
    return [line for line in tail if not line.startswith(":")]  # Ray's own marks (:job_id:, :actor_name:)
