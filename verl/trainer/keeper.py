"""The replicas of a separate pool, as processes that may be lost: who watches and replaces them.

Consumes: deaths, and answers of the replicas. Waits for: a new process, and for the first trainer, which sends it the
version that is sampled with, between two of its calls. Unblocked by: either one's end; what waits for samples hears of
both through the sampling service.

A coroutine of one thread does all of it; other threads read numbers. No sample is lost with a replica: the service
sends its requests to another one, or lets them wait for one. What a request samples follows from its key and the
version, so that under ``rollout.full_determinism`` the tokens are those of a run in which nothing was lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.config import PPOTrainerConfig
from verl.config.machine.pools import REPLACED as KEY
from verl.config.machine.topology import beyond_one_machine, processes_of
from verl.config.rules.checks import raise_all
from verl.errors import VerlError, WorkerError
from verl.metrics import notice
from verl.outcomes import take_error
from verl.rollout.base import Moved
from verl.rollout.hosted import RemoteSampler, WeightIntake
from verl.rollout.reports import ReplicaState
from verl.rollout.service import SamplerService
from verl.single_controller.base import ClassWithInitArgs, WorkerGroup, by_rank
from verl.single_controller.base.handle import Handle
from verl.stacks import Process
from verl.workers.model import ModelWorker
from verl.workers.replica import ReplicaWorker
from verl.workers.roles import Roles
from verl.workers.sending import FeedChange, SyncResult, fed_sampler

if TYPE_CHECKING:
    from verl.single_controller.ray.unit import Unit

LOOK_SECONDS = 0.25
"""Between two looks at the replicas."""
CLOSE_SECONDS = 10.0
REPORT_LOOKS = 10
"""Health checks within which a death is expected to be reported, with what the process wrote last."""
UNKNOWN = ReplicaState()
"""A replica that the service does not have."""


@dataclass
class Placed:
    """A replica, its processes, and its place.

    Args:
        rank: of the actor that sends it weights.
        last_heartbeat: when it last answered, on the monotonic clock.
        is_ending: it is lost, and being replaced.
        health_check: the question that it has not answered yet.
    """

    name: str
    unit: Unit
    slots: Sequence[Any]
    rank: int
    is_ending: bool = False
    last_heartbeat: float = field(default_factory=time.monotonic)
    health_check: asyncio.Task[Any] | None = None


class ReplicaKeeper:
    """Starts the replicas of a run (`start`), and looks after them during it (`watch`).

    Args:
        config: of the run.
        worker: what a replica's process builds.
        groups: worker groups by role.
        pool: the samplers'.
        device: kind of device that each process has.
    """

    def __init__(
        self,
        config: PPOTrainerConfig,
        worker: ClassWithInitArgs,
        groups: Mapping[str, WorkerGroup],
        pool: Any,
        device: str,
    ):
        self.config, self.device = config, device
        self._worker, self._pool = worker, pool
        self._actors, self._service = groups["actor"], groups["rollout"].handle(0)
        self._each = processes_of(config.actor_rollout_ref.rollout, pool.world_size)
        self._replicas: list[Placed] = []
        self._starting: list[Placed] = []
        """Those that take the last version before they serve."""
        self._gone: list[str] = []
        self._started = self._coming = self._at_trainer = 0
        self.replaced, self.error = 0, ""
        self._resent = 0
        self._limit = config.trainer.hang_seconds
        self._looked = time.monotonic()
        self._moved: Callable[[Sequence[Moved]], None] = lambda moved: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._work: set[asyncio.Task[None]] = set()

    # ---- the beginning -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every replica of the pool and load its model.

        Raises:
            Exception: what the first that failed raised, with its name.
        """
        slots = self._pool.slots("STRICT_PACK", self.device)
        places = [slots[first : first + self._each] for first in range(0, len(slots), self._each)]
        ranks = len(self._actors.addresses)
        with ThreadPoolExecutor(len(places)) as threads:
            starts = [threads.submit(self._start, self._next_name(), place) for place in places]
        units = [start.result() for start in starts]
        asyncio.run(_all([unit.call_all(ReplicaWorker.init_model) for unit in units]))
        self._replicas = [
            Placed(unit.name, unit, place, number % ranks) for number, (unit, place) in enumerate(zip(units, places))
        ]

    @property
    def handles(self) -> dict[str, Handle]:
        """Name of a replica -> handle on the worker that leads it."""
        return {replica.name: replica.unit.handle for replica in self._replicas}

    @property
    def addresses(self) -> list[str]:
        """Of the machines on which replicas lie."""
        return sorted({member.address for replica in self._replicas for member in replica.unit.members})

    def feeds(self) -> list[list[str]]:
        """Names of the replicas of each rank of the actor."""
        ranks = range(len(self._actors.addresses))
        return [[replica.name for replica in self._replicas if replica.rank == rank] for rank in ranks]

    def _next_name(self) -> str:
        self._started += 1
        return f"replica {self._started - 1}"

    def _start(self, name: str, slots: Sequence[Any]) -> Unit:
        from verl.single_controller.ray.unit import Unit  # loads Ray

        trainer = self.config.trainer
        share, seconds = 1 / self._pool.max_colocate_count, trainer.ray_wait_register_center_timeout
        return Unit(self._worker, name, slots, share, trainer.seed, seconds)

    # ---- watching ----------------------------------------------------------------------------------------------

    def watch(self, moved: Callable[[Sequence[Moved]], None]) -> None:
        """Look after the replicas in a thread, until `close`.

        Args:
            moved: is called in that thread with the requests that went to another replica.
        """
        self._moved = moved
        for replica in self._replicas:
            replica.last_heartbeat = time.monotonic()  # what was loaded since may have taken longer than the limit
        self._loop = asyncio.new_event_loop()
        self._looking = self._loop.create_task(self._look_for_ever())
        self._thread = threading.Thread(target=self._run, name="verl-replicas", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more, and wait a while for what is in flight; the processes end with the run."""
        loop, looking, thread = self._loop, self._looking, self._thread
        if loop is not None and looking is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(looking.cancel)
            thread.join(CLOSE_SECONDS)
        self._thread = None

    @property
    def is_mending(self) -> bool:
        """Whether the run waits for a replica that is being replaced, or about to be because it is silent."""
        patience, now = (self._limit or 0.0) / 2, time.monotonic()
        is_looking = self._thread is not None and now - self._looked < max(patience, 1.0)
        # One that waits for a trainer is not counted: the trainer may be what hangs.
        is_starting = self._coming > self._at_trainer
        return is_looking and (is_starting or any(now - replica.last_heartbeat > patience for replica in self._placed))

    @property
    def _placed(self) -> list[Placed]:
        return [*self._replicas, *self._starting]

    def metrics(self) -> dict[str, float]:
        """Replicas that serve, replacements so far, and requests that moved since the last call."""
        resent, self._resent = self._resent, 0
        serving = [replica for replica in list(self._replicas) if not replica.is_ending]
        return {
            "rollout/replicas/alive": float(len(serving)),
            "rollout/replicas/replaced": float(self.replaced),
            "rollout/replicas/resent": float(resent),
        }

    def look_at(self) -> list[Process]:
        """State and stacks of every replica's processes."""
        return [process for replica in self._placed for process in replica.unit.look_at()]

    def _run(self) -> None:
        assert self._loop is not None and self._looking is not None, "made by `watch`"
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._looking)
        self._loop.run_until_complete(self._finish())

    async def _finish(self) -> None:
        """Cancel what is in flight and wait for its threads: one that starts a process must not outlive the cluster."""
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_default_executor()

    async def _look_for_ever(self) -> None:
        while not self.error:
            try:
                await self._look()
            except VerlError as error:
                notice("rollout, replicas", f"they cannot be looked after for now: {error}")
            self._looked = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        state = await self._service.call(SamplerService.look)
        self._resent += len(state.moved)
        if state.moved:
            self._moved(state.moved)
        for replica in [replica for replica in self._replicas if not replica.is_ending]:
            self._looked = time.monotonic()  # to look at one that is silent takes long
            self._check_health(replica)
            reported = state.replicas.get(replica.name, UNKNOWN)
            reason = replica.unit.death or reported.broken or await self._why_hung(replica, reported)
            if reason:
                replica.is_ending = True
                self._begin(self._replace(replica, reported, reason))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    def _check_health(self, replica: Placed) -> None:
        if replica.health_check is None:
            replica.health_check = asyncio.ensure_future(replica.unit.handle.call(WeightIntake.status))
            replica.health_check.add_done_callback(take_error)  # the replica's death says more
        if replica.health_check.done():
            check, replica.health_check = replica.health_check, None
            if not check.cancelled() and check.exception() is None:
                replica.last_heartbeat = time.monotonic()

    async def _why_hung(self, replica: Placed, state: ReplicaState = UNKNOWN) -> str:
        """What is known of a replica that has not answered for too long; empty for others."""
        late = time.monotonic() - replica.last_heartbeat
        if self._limit is None or late <= self._limit:
            return ""
        processes = await asyncio.to_thread(replica.unit.look_at)
        node = replica.unit.members[0].address  # also of a process that this node looked at itself
        who = " and ".join(str(dataclasses.replace(process, node=node)) for process in processes)
        drawn = f"{len(state.requests)} requests, of which {state.reported} tokens are known"
        return f"hangs: {who} has not answered for {late:.1f} seconds. It has {drawn}"

    # ---- replacing ---------------------------------------------------------------------------------------------

    async def _replace(self, replica: Placed, state: ReplicaState, reason: str) -> None:
        """Another process in the place of a replica that is lost; as many attempts as are left."""
        name, allowed = replica.name, self.config.actor_rollout_ref.rollout.max_replacements
        self._coming += 1
        try:
            await self._service.call(SamplerService.discard, name)
            for _ in range(REPORT_LOOKS if reason == state.broken else 0):  # who waits for a replica hears of it first
                if not replica.unit.death:
                    await asyncio.sleep(LOOK_SECONDS)
            reason = replica.unit.death or reason
            await asyncio.to_thread(replica.unit.close)
            self._replicas.remove(replica)
            self._gone.append(name)
            subject = f"rollout, {name}, replaced"
            while self.replaced < allowed:
                self.replaced += 1
                notice(subject, f"replacement {self.replaced} of {allowed} starts: {reason}")
                try:
                    return await self._add(replica.slots, replica.rank)
                except Exception as error:  # boundary: whatever the new process or its engine raises
                    reason = f"its replacement did not start: {type(error).__name__}: {error}"
                    subject = f"rollout, {name}, replacement {self.replaced} failed"  # a notice is printed once
            await self._end(name, reason)
        except Exception as error:  # boundary: the service is gone, or Ray
            await self._end(name, f"{reason}. It could not be replaced: {error}")
        finally:
            self._coming -= 1

    async def _end(self, name: str, reason: str) -> None:
        used = f"{self.replaced} of {self.config.actor_rollout_ref.rollout.max_replacements} replacements"
        self.error = f"{KEY}: {name} was lost, and {used} were made in this run. Its last error: {reason}"
        with suppress(WorkerError):  # the service is gone, and its waiters get an error
            await self._service.call(SamplerService.give_up, self.error)

    async def _add(self, slots: Sequence[Any], rank: int) -> None:
        """Start a replica, send it the last version, and let it serve.

        Raises:
            Exception: it did not start, or hangs while it takes the weights.
        """
        name = self._next_name()
        unit = await asyncio.to_thread(self._start, name, slots)
        try:
            limit = self.config.trainer.ray_wait_register_center_timeout
            await asyncio.wait_for(unit.call_all(ReplicaWorker.init_model), limit)
            replica = Placed(name, unit, slots, rank)
            await self._unless_it_hangs(replica, self._serve(replica))
        except BaseException:  # also a cancellation: the process must not outlive it; it passes on
            self._gone.append(name)
            await asyncio.to_thread(unit.close)
            raise
        self._replicas.append(replica)

    async def _serve(self, replica: Placed) -> None:
        await self._feed(replica.unit, replica.rank)
        await self._service.call(SamplerService.add, replica.name, RemoteSampler(replica.unit.handle))

    async def _unless_it_hangs(self, replica: Placed, work: Coroutine[Any, Any, None]) -> None:
        """Do something that waits for a replica which is not among the others so far.

        Raises:
            WorkerError: it hung and was ended, which unblocks its waiters.
        """
        task = asyncio.ensure_future(work)
        self._starting.append(replica)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_SECONDS)
                self._check_health(replica)
                reason = await self._why_hung(replica)
                if reason:
                    await asyncio.to_thread(replica.unit.close)
                    await asyncio.wait({task}, timeout=CLOSE_SECONDS)
                    raise WorkerError(reason)
            await task
        finally:
            self._starting.remove(replica)
            task.cancel()
            task.add_done_callback(take_error)

    async def _feed(self, unit: Unit, rank: int) -> None:
        """Trainers have calls of their own in work; this one comes between two of them."""
        host = self._host(unit, rank)
        sampler, gone = fed_sampler(self.config.actor_rollout_ref, self.device, unit.handle, host), tuple(self._gone)
        first = sampler if rank == 0 else fed_sampler(
            self.config.actor_rollout_ref, self.device, unit.handle, self._host(unit, 0)
        )  # fmt: skip
        changes = [
            FeedChange(gone, {unit.name: sampler} if r == rank else {}, {unit.name: first} if r == 0 else {})
            for r in range(len(self._actors.addresses))
        ]
        self._at_trainer += 1
        try:
            results = await self._change(changes)
        finally:
            self._at_trainer -= 1
        self._gone = [name for name in self._gone if name not in gone]
        for error in SyncResult.by_all(results).failed.values():
            raise error

    async def _change(self, changes: list[FeedChange]) -> list[SyncResult]:
        return await asyncio.to_thread(by_rank(self._actors, ModelWorker.change_feeds), changes)

    def _host(self, unit: Unit, rank: int) -> str | None:
        """The address at which a rank of the actor is reached from another machine; None on its own."""
        here, there = self._actors.addresses[rank], unit.members[0].address
        if here == there:
            return None
        where = f"the trainers and {unit.name} lie on 2 machines ({here}, {there})"
        raise_all(beyond_one_machine(self.config, where, 2))
        return str(here)


def processes_of_run(roles: Roles, keeper: ReplicaKeeper | None) -> list[Process]:
    """State and stacks of a run's processes in other process trees or on other nodes, even of one that hangs."""
    replicas = [] if keeper is None else keeper.look_at()
    return [*replicas, *(process for group in roles.groups() for process in group.look_at_processes())]


def waits_for_replica(keeper: ReplicaKeeper | None) -> bool:
    """Whether a replica is being replaced, which the run waits for."""
    return keeper is not None and keeper.is_mending


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*work)
