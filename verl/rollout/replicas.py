"""Several engines behind one sampler: who gets a request, and what happens when an engine dies over it.

Consumes: requests and weights. Waits for: the replica that was chosen. Unblocked by: its answer, or its loss, after
which the request goes to another one. What a request samples is a function of its key, so it may be sent
twice; only one answer is ever returned.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from verl.errors import RolloutError, WorkerError
from verl.metrics import notice
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.lost import EngineLostError
from verl.weight_sync import WeightChunk

LOSSES = (EngineLostError, WorkerError, ConnectionError)
"""What a replica raises when it, and not the request, is at fault."""
REMEMBERED = 100_000
"""Conversations and prompts whose replica is remembered."""
SLACK = 8
"""Requests by which a replica may be ahead of the least loaded one and still get another sample of its prompt."""
FAILURES = 2
"""Losses in a row after which a replica gets no more requests."""


class Callee(Protocol):
    """A sampler somewhere: a `Handle` of any runtime, or `Here`."""

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any: ...


class Here:
    """A sampler of this process, called like a handle."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.sampler, method)(*args, **kwargs)
        return await found if asyncio.iscoroutine(found) else found


class Replica:
    """One engine and what is known of it."""

    def __init__(self, name: str, callee: Callee):
        self.name, self.callee = name, callee
        self.load = 0
        self.failures = 0
        self.lost_at: float | None = None
        self.reason = ""
        self.ids: set[str] = set()

    @property
    def is_lost(self) -> bool:
        return self.lost_at is not None

    def found(self) -> None:
        """It answered."""
        self.failures, self.lost_at = 0, None


class Router:
    """Which replica gets a request.

    The turns of a conversation go where its cache is. Another sample of a prompt goes where the prompt was computed,
    unless that replica is `SLACK` requests ahead. Everything else goes to the least loaded, in turn among equals.
    """

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = list(replicas)
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
            chosen = prompt
        else:
            self._turn += 1
            free = [replica for replica in may if replica.load == least]
            chosen = free[self._turn % len(free)]
        assert chosen is not None
        self._remember(self._sessions, request.session, chosen)
        self._remember(self._prompts, request.uid, chosen)
        return chosen

    def _remember(self, places: OrderedDict[str, Replica], key: str, replica: Replica) -> None:
        if not key:
            return
        places[key] = replica
        places.move_to_end(key)
        if len(places) > REMEMBERED:
            places.popitem(last=False)


class Replicas(Sampler):
    """Several samplers as one.

    A request whose replica is lost is sent to another one. A lost replica gets no more requests: before the first
    update of the weights it is tried again after a while, later it comes back with the next update that it takes, since
    until then nobody knows which weights it has.

    Args:
        callees: the samplers, or handles on them.
        names: for messages.
        max_resends: of one request, which ends requests that kill every engine they meet.
        retry_seconds: after which a lost replica is tried again.

    Example:
        >>> sampler = Replicas([host_object(ClassWithInitArgs(HFSampler, path)) for _ in range(4)])
    """

    def __init__(
        self,
        callees: Sequence[Sampler | Callee],
        names: Sequence[str] | None = None,
        *,
        max_resends: int = 3,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not callees:
            raise RolloutError("there are no replicas", key="actor_rollout_ref.rollout")
        shown = names or [f"replica {number}" for number in range(len(callees))]
        self.replicas = [Replica(n, Here(c) if isinstance(c, Sampler) else c) for n, c in zip(shown, callees)]
        self.max_resends, self.retry_seconds, self._clock = max_resends, retry_seconds, clock
        self._router = Router(self.replicas)
        self._version = 0
        self._updates = 0
        self._stats: dict[str, dict[str, float]] = {}
        self._counts = {"resent": 0, "replicas_lost": 0}

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        avoided: set[str] = set()
        last: BaseException | None = None
        for _ in range(self.max_resends + 1):
            replica = self._choose(request, avoided, last)
            try:
                return await self._on(replica, request)
            except LOSSES as error:
                self._note_loss(replica, error)
                avoided.add(replica.name)
                self._counts["resent"] += 1
                last = error
        self._counts["resent"] -= 1
        raise EngineLostError(
            f"request {request.id!r} was lost by {len(avoided)} replicas in turn, the last time: {last}"
        ) from last

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """All replicas take the stream; one that does not is lost until the next update.

        The stream is kept until the last replica has it.

        Raises:
            RolloutError: no replica took it.
        """
        stream = list(chunks)
        found = await asyncio.gather(
            *(replica.callee.call("update_weights", stream, version) for replica in self.replicas),
            return_exceptions=True,
        )
        errors = [(r, e) for r, e in zip(self.replicas, found) if isinstance(e, BaseException)]
        for replica, error in errors:
            if not isinstance(error, Exception):
                raise error
            self._lose(replica, error)
        if len(errors) == len(self.replicas):
            raise errors[0][1]
        for replica, error in zip(self.replicas, found):
            if not isinstance(error, BaseException):
                replica.found()
        self._version, self._updates = version, self._updates + 1

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        wanted = None if request_ids is None else set(request_ids)
        calls = []
        for replica in self._alive():
            ids = sorted(replica.ids if wanted is None else replica.ids & wanted)
            if ids:
                calls.append(replica.callee.call("abort", ids))
        return sum(found for found in await asyncio.gather(*calls, return_exceptions=True) if isinstance(found, int))

    async def sleep(self, level: int = 1) -> None:
        await self._all("sleep", level)

    async def wake(self) -> None:
        await self._all("wake")

    def stats(self) -> dict[str, float]:
        """Sums over the replicas of this process, ``resent`` requests, and how many replicas are left."""
        found: dict[str, float] = {}
        for replica in self.replicas:
            if isinstance(replica.callee, Here):
                for name, value in replica.callee.sampler.stats().items():
                    found[name] = found.get(name, 0.0) + value
        return {
            "forward_tokens": 0.0,
            "steps": 0.0,
            **found,
            **self._counts,
            "replicas_alive": float(len(self._alive())),
        }

    async def _on(self, replica: Replica, request: Request) -> Completion:
        replica.load += 1
        replica.ids.add(request.id)
        try:
            done: Completion = await replica.callee.call("generate", request)
        finally:
            replica.load -= 1
            replica.ids.discard(request.id)
        if not replica.is_lost or not self._updates:
            replica.found()
        return done

    def _choose(self, request: Request, avoided: set[str], last: BaseException | None) -> Replica:
        due = None if avoided else self._due()
        if due is not None:
            return due
        alive = self._alive()
        may = [replica for replica in alive if replica.name not in avoided] or alive
        if not may:
            reasons = "; ".join(f"{replica.name}: {replica.reason}" for replica in self.replicas[:3])
            raise EngineLostError(f"no replica is left of {len(self.replicas)}: {reasons}") from last
        return self._router.choose(request, may)

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.is_lost]

    def _due(self) -> Replica | None:
        """A lost replica that one request may try; the next ones wait for what becomes of it."""
        for replica in self.replicas if not self._updates else ():
            if replica.lost_at is not None and self._clock() - replica.lost_at >= self.retry_seconds:
                replica.lost_at = self._clock()
                return replica
        return None

    async def _all(self, method: str, *arguments: Any) -> None:
        chosen = [replica for replica in self.replicas if not replica.is_lost]
        found = await asyncio.gather(
            *(replica.callee.call(method, *arguments) for replica in chosen), return_exceptions=True
        )
        for replica, error in zip(chosen, found):
            if isinstance(error, LOSSES):
                self._lose(replica, error)
            elif isinstance(error, BaseException):
                raise error

    def _note_loss(self, replica: Replica, error: BaseException) -> None:
        replica.failures += 1
        if isinstance(error, WorkerError) or replica.failures >= FAILURES:
            self._lose(replica, error)

    def _lose(self, replica: Replica, error: BaseException) -> None:
        if replica.lost_at is None:
            self._counts["replicas_lost"] += 1
            notice(f"rollout, {replica.name}", f"lost, its requests go to the others: {error}")
        replica.lost_at, replica.reason = self._clock(), str(error)
