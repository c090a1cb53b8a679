"""Sampling as a service: replicas of one policy behind one sampler, which may be lost and replaced while it runs.

Consumes: requests, and the word that new weights were sent. Waits for: the replica that was chosen. Unblocked by: its
answer, or its loss, after which the request goes to another one. What a request samples is a function of its key, so it
may be sent twice; only one answer is ever returned.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from verl.errors import RolloutError, WorkerError
from verl.metrics import notice
from verl.rollout.base import Completion, Moved, Request, Sampler
from verl.rollout.lost import LOSSES, EngineLostError
from verl.rollout.readiness import Gate
from verl.rollout.reports import AttemptReport, DrawnReports, ReplicaState, ServiceState
from verl.rollout.request_spans import RequestSpans
from verl.rollout.resume import continued, join_attempts
from verl.rollout.waiting import Queue
from verl.weight_sync import WeightChunk, deliver

T = TypeVar("T")
REMEMBERED = 100_000
"""Conversations and prompts whose replica is remembered."""
SLACK = 8
"""Requests by which a replica may be ahead of the least loaded one and still get another sample of its prompt."""
FAILURES = 2
"""Losses in a row after which a replica gets no more requests."""


class Replica:
    """One engine and its state."""

    def __init__(self, name: str, sampler: Sampler):
        self.name, self.sampler = name, sampler
        self.failures = 0
        self.completed = 0
        self.lost_at: float | None = None
        self.reason = ""
        self.is_broken = False
        self.ids: set[str] = set()
        self.reports = DrawnReports(name, sampler)

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.ids)

    @property
    def reported(self) -> int:
        """Tokens of its requests that it has drawn, as far as it has said."""
        return self.reports.num_drawn

    @property
    def is_lost(self) -> bool:
        return self.lost_at is not None

    def recovered(self) -> None:
        """It answered."""
        self.failures, self.lost_at, self.is_broken = 0, None, False


class Router:
    """Which replica gets a request.

    The turns of a conversation go where its cache is. Another sample of a prompt goes where the prompt was computed,
    unless that replica is `SLACK` requests ahead. Everything else goes to the least loaded, round-robin among equals.
    """

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._prompts: OrderedDict[str, Replica] = OrderedDict()
        self._turn = 0

    def choose(self, request: Request, may: Sequence[Replica]) -> Replica:
        """One of ``may``, which is not empty."""
        session = self._sessions.get(request.session)
        if request.session and session in may:
            self._sessions.move_to_end(request.session)
            return session  # type: ignore[return-value]  # it is in `may`
        least = min(replica.load for replica in may)
        prompt = self._prompts.get(request.uid)
        if request.uid and prompt in may and prompt.load <= least + SLACK:  # type: ignore[union-attr]
            replica = prompt
        else:
            self._turn += 1
            free = [replica for replica in may if replica.load == least]
            replica = free[self._turn % len(free)]
        assert replica is not None
        self._remember(self._sessions, request.session, replica)
        self._remember(self._prompts, request.uid, replica)
        return replica

    def of_session(self, request: Request) -> Replica | None:
        """The replica that has the cache of the request's conversation."""
        return self._sessions.get(request.session) if request.session else None

    def leave(self, request: Request) -> None:
        """The cache of the request's conversation is void: any replica may get it."""
        self._sessions.pop(request.session, None)

    def forget(self, replica: Replica) -> None:
        """A replica that has left."""
        for places in (self._sessions, self._prompts):
            for key in [key for key, place in places.items() if place is replica]:
                del places[key]

    def _remember(self, places: OrderedDict[str, Replica], key: str, replica: Replica) -> None:
        if not key:
            return
        places[key] = replica
        places.move_to_end(key)
        if len(places) > REMEMBERED:
            places.popitem(last=False)


class SamplerService(Sampler):
    """Several samplers as one.

    A request whose replica is lost is sent to another one. One that new weights interrupted resumes from its prefix
    at any replica; however often that happens, the caller sees one completion. A lost replica gets no more
    requests: before the first weights were published it is retried after a while; later it returns with the next
    version that it has, since its weights are unknown until then. A service of one replica adds nothing: its errors
    reach the caller.

    Where lost replicas are replaced, requests wait for one while there is none, and do so until `give_up`.

    Args:
        replicas: name -> sampler; names are for messages and statistics.
        max_resends: of one request, to stop requests that kill every engine.
        slots: requests that a replica computes at once. More wait here for the first free slot of any replica, the
            longest expected answer first (`Queue`), so that none waits for long answers while another replica is idle;
            turns of a conversation do not wait.
        retry_seconds: after which a lost replica is tried again.
        lost_seconds: that a lost replica may take to free its memory.
        report_seconds: between two reports of what a request has drawn, from which another replica resumes it if its
            own is lost; None: it starts from the prompt, so with ``rollout.full_determinism`` no bit depends on a loss.
        is_elastic: the caller replaces lost replicas (`add`, `discard`); there may be none at first.

    Example:
        >>> service = SamplerService({f"server {url}": ServerSampler(url, model) for url in urls})
    """

    def __init__(
        self,
        replicas: Mapping[str, Sampler],
        *,
        max_resends: int = 3,
        slots: int = 256,
        retry_seconds: float = 5.0,
        lost_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        is_elastic: bool = False,
        report_seconds: float | None = None,
    ):
        if not replicas and not is_elastic:
            raise RolloutError("there are no replicas", key="actor_rollout_ref.rollout")
        self.replicas = [Replica(name, sampler) for name, sampler in replicas.items()]
        self.max_resends, self.slots, self.report_seconds = max_resends, slots, report_seconds
        self.retry_seconds, self.lost_seconds, self._clock = retry_seconds, lost_seconds, clock
        self._queue = Queue(clock)
        self._router, self._gate = Router(), Gate()
        self._version = 0
        self._published = 0
        self._counts = {"resent": 0, "replicas_lost": 0, "interrupted": 0}
        self._in_flight: set[str] = set()
        self._at_gate: set[str] = set()
        self._given_up: set[str] = set()
        self.is_elastic, self._end = is_elastic, ""
        self.spans = RequestSpans(lambda: self.version)
        self._moved: list[Moved] = []

    @property
    def version(self) -> int:
        return self._version if self._published or not self._is_single else self.replicas[0].sampler.version

    async def generate(self, request: Request) -> Completion:
        if self.spans.has(request):
            return await self.spans.follow_up(request, self._serve)
        self.spans.restart(request)
        return await self._serve(request)

    async def _serve(self, request: Request) -> Completion:
        parts: list[Completion] = []
        self._in_flight.add(request.id)
        try:
            while True:
                self._at_gate.add(request.id)
                async with self._gate.inside():
                    self._at_gate.discard(request.id)
                    parts.append(await self._route(request))
                if not parts[-1].is_interrupted:
                    return join_attempts(parts)
                if request.id in self._given_up:
                    return replace(join_attempts(parts), is_interrupted=False)
                self._counts["interrupted"] += 1
                self._router.leave(request)
                request = continued(request, parts[-1])
        finally:
            for ids in (self._in_flight, self._at_gate, self._given_up):
                ids.discard(request.id)

    async def _route(self, request: Request) -> Completion:
        if request.id in self._given_up:  # it was aborted at the gate
            return Completion(request.id, (), (), "abort", ())
        if self._is_single and not self.replicas[0].is_lost:
            return await self._attempt(self.replicas[0], request)
        parts: list[Completion] = []
        avoided: set[str] = set()
        last: BaseException | None = None
        arrival = self._queue.arrived()
        for _ in range(self.max_resends + 1):
            replica = await self._acquire(request, arrival, avoided, last)
            if replica is None or request.id in self._given_up:
                self._queue.call_next()  # where a slot was free, others can use it
                return join_attempts((*parts, Completion(request.id, (), (), "abort", ())))
            self._queue.began(request, arrival)
            done = None
            try:
                report = None if self.report_seconds is None else AttemptReport(request)
                done = await self._attempt(replica, request, report)
            except LOSSES as error:
                request = self._with_report(replica, request, report, parts)
                self._note_loss(replica, error)
                avoided.add(replica.name)
                self._counts["resent"] += 1
                if self.is_elastic:
                    self._moved.append(_moved(request))
                last = error
                continue
            finally:
                self._queue.ended(request, arrival, in_full=done is not None and done.finish_reason != "abort")
                self._queue.call_next()
            if not replica.is_lost or not self._published:
                replica.recovered()
            return join_attempts((*parts, done))
        self._counts["resent"] -= 1
        raise EngineLostError(
            f"request {request.id!r} was lost by {len(avoided)} replicas in turn, the last time: {last}"
        ) from last

    def _with_report(
        self, replica: Replica, request: Request, report: AttemptReport | None, parts: list[Completion]
    ) -> Request:
        """The rest of a request whose replica was lost: what that had reported is kept, as one more part."""
        part = None if report is None else report.drawn()
        if part is None:
            return request
        parts.append(part)
        self.spans.add(replica.name, part)
        return continued(request, part)

    async def _attempt(self, replica: Replica, request: Request, report: AttemptReport | None = None) -> Completion:
        """A replica's answer; meanwhile the report, if there is one, gets what is drawn."""
        replica.ids.add(request.id)
        if report is not None:
            replica.reports.begin(report, self.report_seconds or 0.0)
        try:
            done = await replica.sampler.generate(request)
        finally:
            if report is not None:
                replica.reports.end(report)
            replica.ids.discard(request.id)
        replica.completed += 1
        self.spans.add(replica.name, done)
        return done

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """All replicas take the stream, bucket by bucket and each once; then it is published.

        Running requests end first; a single replica does with them what its ``at_update`` says.

        Raises:
            Exception: what the first replica raised, where none took it.
        """
        if self._is_single and self.replicas[0].sampler.at_update != "wait":
            await self.replicas[0].sampler.update_weights(chunks, version)
            return await self.publish(version)
        async with self._gate.shut():
            replicas = list(self.replicas)
            errors = await deliver([one.sampler for one in replicas], chunks, version, [one.name for one in replicas])
            failed = {replica.name: error for replica, error in zip(replicas, errors) if error is not None}
            await self.publish(version, failed)

    async def publish(self, version: int, failed: Mapping[str, Exception] | None = None) -> None:
        """Sample with a version that was sent, after querying each replica's version.

        One that has another, or does not answer, gets no requests until the next version that it has.

        Args:
            failed: name -> the error of sending it there.

        Raises:
            Exception: the first reason, where no replica has it.
        """
        replicas = list(self.replicas)
        failed = {name: error for name, error in (failed or {}).items() if name in self._names()}  # others have left
        receivers = [replica for replica in replicas if replica.name not in failed]
        answers = await asyncio.gather(*(r.sampler.confirm(version) for r in receivers), return_exceptions=True)
        for replica, answer in zip(receivers, answers):
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
            if isinstance(answer, Exception):
                failed[replica.name] = answer
            elif answer != version:
                failed[replica.name] = RolloutError("it has other weights", got=answer, allowed=[version])
        if len(failed) == len(replicas) and not self._are_replaced(failed.values()):
            raise failed[replicas[0].name]
        for replica in replicas:
            if replica.name in failed:
                self._lose(replica, failed[replica.name])
            else:
                replica.recovered()
        self._version, self._published = version, self._published + 1
        for replica in self.replicas:
            if replica not in replicas:  # it was added while the others were queried
                self._take_or_lose(replica)
        if self.is_elastic:  # requests may wait for a replica that has this version
            self._wake_waiting()
        self.spans.published()

    async def confirm(self, version: int) -> int:
        await self.publish(version)
        return self.version

    async def add(self, name: str, sampler: Sampler) -> None:
        """One more replica; where weights were published it gets requests if it has them.

        Raises:
            RolloutError: there is one of this name.
        """
        if name in self._names():
            raise RolloutError("there is a replica of this name", got=name, fix="Give it another one.")
        replica = Replica(name, sampler)
        if self._published:
            await sampler.confirm(self._version)
            if name in self._names():
                raise RolloutError("another replica of this name came meanwhile", got=name)
            self._take_or_lose(replica)
        self.replicas.append(replica)
        self._wake_waiting()

    async def discard(self, name: str) -> None:
        """Remove a replica whose process is gone or about to be ended; its requests go to others when their calls fail.

        Nothing happens where there is none of this name.
        """
        for replica in [replica for replica in self.replicas if replica.name == name]:
            self.replicas.remove(replica)
            self._router.forget(replica)

    async def give_up(self, reason: str) -> None:
        """No replica will be replaced any more: from here on every request is an error, also one that waits."""
        self._end = reason
        self._wake_waiting()

    async def look(self) -> ServiceState:
        """What each replica does, and which requests lost theirs since the last call."""
        moved, self._moved = self._moved, []
        states = {
            one.name: ReplicaState(tuple(sorted(one.ids)), one.reason if one.is_broken else "", one.reported)
            for one in self.replicas
        }
        return ServiceState(states, tuple(moved))

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        aborted = None if request_ids is None else set(request_ids)
        self._given_up |= self._in_flight if aborted is None else self._in_flight & aborted
        num_waiting = len(self._at_gate if aborted is None else self._at_gate & aborted)
        num_waiting += self._queue.abort(aborted)  # first: a slot that becomes free now must not go to one of them
        calls = []
        for replica in self.replicas:
            ids = sorted(replica.ids if aborted is None else replica.ids & aborted)
            if ids and not replica.is_lost:
                calls.append(replica.sampler.abort(ids))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return num_waiting + sum(n for n in answers if isinstance(n, int))

    async def sleep(self, level: int = 1) -> None:
        """All replicas, also lost ones, which may still hold memory that a colocated trainer needs.

        Errors of a lost one are ignored, and one that does not answer is not waited for long.
        """
        lost = [replica.sampler for replica in self.replicas if replica.is_lost]
        await self._all(lambda sampler: sampler.sleep(level))
        await self._try(lost, lambda sampler: sampler.sleep(level))

    async def wake(self) -> None:
        """All replicas; lost ones as long as they are tried again, because `sleep` reached them too."""
        lost = [] if self._published else [replica.sampler for replica in self.replicas if replica.is_lost]
        await self._all(lambda sampler: sampler.wake())
        await self._try(lost, lambda sampler: sampler.wake())

    def stats(self) -> dict[str, float]:
        """Sums over the replicas, ``resent`` requests, and how many replicas are left."""
        sums: dict[str, float] = {"forward_tokens": 0.0, "steps": 0.0}
        for replica in self.replicas:
            for name, value in replica.sampler.stats().items():
                sums[name] = sums.get(name, 0.0) + value
        return {**sums, **self._counts, "replicas_alive": float(len(self._alive()))}

    def replica_stats(self) -> dict[str, dict[str, float]]:
        """Name of a replica -> requests that it has and has answered, whether it is lost, and what it counts itself."""
        return {
            replica.name: {
                **replica.sampler.stats(),
                "load": float(replica.load),
                "completed": float(replica.completed),
                "is_lost": float(replica.is_lost),
            }
            for replica in self.replicas
        }

    @property
    def _is_single(self) -> bool:
        return len(self.replicas) == 1 and not self.is_elastic

    def _are_replaced(self, errors: Iterable[Exception]) -> bool:
        """Whether these are losses of replicas that others will come for."""
        return self.is_elastic and not self._end and all(isinstance(error, LOSSES) for error in errors)

    def _wake_waiting(self) -> None:
        """Let as many requests as one replica has room for look again."""
        for _ in range(self.slots):
            self._queue.call_next()

    def _names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    async def _acquire(
        self, request: Request, arrival: int, avoided: set[str], last: BaseException | None
    ) -> Replica | None:
        """The replica that gets a request, once it has room for it; None for one that is aborted while it waits."""
        was_called = False
        while True:
            if self._end:
                self._queue.call_next()  # each wakes the next one
                raise EngineLostError(self._end) from last
            due = None if avoided else self._due()
            if due is not None:
                return due
            alive = self._alive()
            may = [replica for replica in alive if replica.name not in avoided] or alive
            if not may and self.is_elastic:
                if not await self._queue.turn(request, arrival):
                    return None
                continue
            if not may:
                self._queue.call_next()  # no request will end there any more, so wake the waiting ones
                reasons = "; ".join(f"{replica.name}: {replica.reason}" for replica in self.replicas[:3])
                raise EngineLostError(f"no replica is left of {len(self.replicas)}: {reasons}") from last
            has_room = [replica for replica in may if replica.load < self.slots]
            if self._router.of_session(request) in may:
                return self._router.choose(request, may)
            if has_room:
                return self._router.choose(request, has_room)
            if was_called and any(replica.load < self.slots for replica in alive):
                self._queue.call_next()  # the slot is at a replica that lost this request: others can use it
            was_called = await self._queue.turn(request, arrival)
            if not was_called:
                return None

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.is_lost]

    def _due(self) -> Replica | None:
        """A lost replica that one request may try; the next ones wait for its result."""
        for replica in self.replicas if not self._published else ():
            if replica.lost_at is not None and self._clock() - replica.lost_at >= self.retry_seconds:
                replica.lost_at = self._clock()
                return replica
        return None

    async def ask_each(self, requests: Sequence[Request]) -> dict[str, list[Completion]]:
        """Name of each replica that is not lost -> its own answers to these requests, which bypass the router."""

        async def answers(sampler: Sampler) -> list[Completion]:
            return await asyncio.gather(*(sampler.generate(request) for request in requests))

        return await self._all(answers)

    async def _all(self, call: Callable[[Sampler], Coroutine[Any, Any, T]]) -> dict[str, T]:
        """Name of each replica that is not lost, before and after -> its answer."""
        alive = [replica for replica in self.replicas if not replica.is_lost]
        answers = await asyncio.gather(*(call(replica.sampler) for replica in alive), return_exceptions=True)
        for replica, error in zip(alive, answers):
            if isinstance(error, LOSSES) and not self._is_single:
                self._lose(replica, error)
            elif isinstance(error, BaseException):
                raise error
        return {one.name: answer for one, answer in zip(alive, answers) if not isinstance(answer, BaseException)}

    async def _try(self, samplers: Iterable[Sampler], call: Callable[[Sampler], Any]) -> None:
        """Call lost replicas, and ignore what goes wrong."""
        calls = (asyncio.wait_for(call(sampler), self.lost_seconds) for sampler in samplers)
        await asyncio.gather(*calls, return_exceptions=True)

    def _note_loss(self, replica: Replica, error: BaseException) -> None:
        replica.failures += 1
        if isinstance(error, WorkerError) or replica.failures >= FAILURES:
            self._lose(replica, error)

    def _take_or_lose(self, replica: Replica) -> None:
        """One that was added gets requests if it has the version that is sampled with."""
        has = replica.sampler.version
        if has == self._version:
            replica.recovered()
        else:
            self._lose(replica, RolloutError("it has other weights", got=has, allowed=[self._version]))

    def _lose(self, replica: Replica, error: BaseException) -> None:
        if replica.lost_at is None:
            self._counts["replicas_lost"] += 1
            notice(f"rollout, {replica.name}", f"lost, its requests go to the others: {error}")
        replica.lost_at, replica.reason = self._clock(), str(error)
        replica.is_broken = isinstance(error, LOSSES)


def _moved(rest: Request) -> Moved:
    return rest.uid, rest.sample_index, len(rest.generated_prefix)
