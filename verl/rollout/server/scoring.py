"""Log-probs of given tokens from several servers of one model: who gets a row, and what follows when a server is lost.

Consumes: rows. Waits for: a free place at a server, its answer, a server that is started again. Unblocked by: these;
each row has a limited number of attempts. A score is a function of its tokens: a row may be sent twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from verl.errors import RolloutError
from verl.metrics import notice
from verl.outcomes import on_error, take_error
from verl.rollout.base import Sampler
from verl.rollout.lost import EngineBusyError, EngineLostError, EngineSilentError
from verl.rollout.scores import ScoreRequest, Scores, invalid_scores
from verl.rollout.server.client import LONGEST_DELAY
from verl.rollout.server.process import HostProcess

AVOIDED_SECONDS = 5.0
"""For which a server that lost a row gets others only where there is no better one."""
MAX_RESTARTS = 3
"""Of a host in a row, without an answer in between, after which it gets no more rows."""


class ScoringReplica:
    """A server that was started elsewhere.

    Attributes:
        load: rows that it has.
        rests_until: the end of the pause that it requested, by `time.monotonic`.
        restarts: how often it was started again.
    """

    restarts = 0

    def __init__(self, name: str, sampler: Sampler | None):
        self.name, self.sampler = name, sampler
        self.load, self.lost_at, self.rests_until = 0, -AVOIDED_SECONDS, 0.0

    def answered(self) -> None:
        """It has scored a row."""

    def lost(self, error: EngineLostError, sent_at: float) -> None:
        """It has lost a row that it got at ``sent_at``, by `time.monotonic`."""
        self.lost_at = time.monotonic()
        if isinstance(error, EngineBusyError) and isinstance(error.got, float):  # its Retry-After
            self.rests_until = self.lost_at + min(LONGEST_DELAY, error.got)

    def mending(self) -> Future[None] | None:
        """The start of a process in the place of one that ended; None where none has."""
        return None

    def close(self) -> None:
        """Leave it as it is."""


class WatchedHost(ScoringReplica):
    """A host of this library, which is started again when its process has ended or hangs.

    It hangs where a row reached its time limit and no row was answered in that time.

    Args:
        start: begins a process.
        connect: the sampler over one that is up.
        seconds: that it may take to come up.
    """

    def __init__(
        self, name: str, start: Callable[[], HostProcess], connect: Callable[[HostProcess], Sampler], seconds: float
    ):
        super().__init__(name, None)
        self._start, self._connect, self._seconds = start, connect, seconds
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"verl-{name}")
        self._is_closed = False
        self._former: list[Sampler | None] = []  # their connections end with the event loop that made them
        self._in_a_row, self._hang = 0, ""
        self._up_at = self._answered_at = 0.0
        self.process = start()
        self._coming: Future[None] = self._threads.submit(self._come_up, self.process)

    def answered(self) -> None:
        self._answered_at, self._in_a_row = time.monotonic(), 0

    def lost(self, error: EngineLostError, sent_at: float) -> None:
        super().lost(error, sent_at)
        # A row of an earlier process says nothing about this one.
        if isinstance(error, EngineSilentError) and sent_at > max(self._answered_at, self._up_at):
            self._hang = f"it hangs: {error}"

    def mending(self) -> Future[None] | None:
        if self._is_closed:
            raise EngineLostError(f"{self.name} is closed")
        if not self._coming.done():
            return self._coming
        error = self._coming.exception()
        if error is None and self.process.is_alive and not self._hang:
            return None
        if error is not None and (self.sampler is None or self._in_a_row >= MAX_RESTARTS):
            return self._coming  # that error is every later row's, too
        reason = str(error) if error is not None else self._hang or self.process.exit_report
        if self._in_a_row >= MAX_RESTARTS:
            self._coming = Future()
            message = f"{self.name} was lost {self._in_a_row + 1} times in a row without an answer in between"
            self._coming.set_exception(EngineLostError(f"{message}, the last time: {reason}"))
            return self._coming
        self.restarts, self._in_a_row = self.restarts + 1, self._in_a_row + 1
        notice(f"{self.name}, start {self.restarts + 1}", f"it is started again: {reason}")
        self._coming = self._threads.submit(self._again)
        return self._coming

    def _again(self) -> None:
        after = "it gets no more rows" if self._in_a_row >= MAX_RESTARTS else "one more start follows"
        with on_error(lambda error: notice(f"{self.name}, start {self.restarts + 1} failed", f"{after}: {error}")):
            self.process.close()  # of one that hangs it takes seconds
            self.process = self._start()
            self._come_up(self.process)

    def _come_up(self, process: HostProcess) -> None:
        with on_error(lambda _: process.close()):
            if self._is_closed:
                raise EngineLostError(f"{self.name} was closed while it started")
            asyncio.run(process.wait_until_up(self._seconds))
            self._former.append(self.sampler)
            self.sampler, self.lost_at = self._connect(process), -AVOIDED_SECONDS
            self._hang, self._up_at = "", time.monotonic()

    def close(self) -> None:
        """End the process; one that is just starting ends as well."""
        self._is_closed = True
        self.process.close()
        self._threads.shutdown(wait=True)
        self.process.close()


class ScoringPool:
    """Servers of one model.

    Args:
        replicas: at least one.
        vocab_size: of the model whose rows are scored; other listed tokens are refused.
        slots: rows in flight at each of them.
        max_attempts: of a row.
        retry_delay: seconds before a row goes to a server that has lost it already; twice as long each time.
    """

    def __init__(
        self, replicas: Sequence[ScoringReplica], vocab_size: int, slots: int, max_attempts: int, retry_delay: float
    ):
        self.replicas, self.vocab_size = list(replicas), vocab_size
        self.slots, self.max_attempts, self.retry_delay = slots, max_attempts, retry_delay
        self._attempts = self._retries = 0
        self._taken: dict[str, int] = {}
        self._freed = asyncio.Event()

    def take_counts(self) -> dict[str, int]:
        """Since the last call: ``requests`` (attempts), ``retries`` (those after a loss) and ``restarts`` of hosts."""
        restarts = sum(replica.restarts for replica in self.replicas)
        now = {"requests": self._attempts, "retries": self._retries, "restarts": restarts}
        before, self._taken = self._taken, now
        return {name: count - before.get(name, 0) for name, count in now.items()}

    async def check(self, request: ScoreRequest) -> None:
        """Every server comes up and scores a row.

        Raises:
            VerlError: of the first that does not.
        """
        starts = [start for replica in self.replicas if (start := replica.mending()) is not None]
        await asyncio.gather(*map(asyncio.wrap_future, starts))
        await asyncio.gather(*(self._scored_by(replica, request) for replica in self.replicas))

    async def score_all(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """The answers, in order; rows beyond the places at the servers wait here.

        Raises:
            EngineLostError: a row was lost too often.
            RolloutError: a server refuses a row, or its answer cannot be that row's.
        """
        # Taken by each row's task in the caller's loop, in order of the rows; released with its answer or its error.
        # A row inside still waits for a place at a server: while one is down, the others do not get its share at once.
        self._freed = asyncio.Event()  # of this event loop
        places = asyncio.Semaphore(self.slots * len(self.replicas))

        async def one(request: ScoreRequest) -> Scores:
            async with places:
                return await self._score(request)

        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(self, request: ScoreRequest) -> Scores:
        losers: list[ScoringReplica] = []
        last: EngineLostError | None = None
        for attempt in range(self.max_attempts):
            replica = await self._choose(losers)
            self._attempts += 1
            self._retries += attempt > 0
            replica.load += 1
            sent_at = time.monotonic()
            try:
                scores = await self._scored_by(replica, request)
            except EngineLostError as error:
                last = error
                replica.lost(error, sent_at)
                losers.append(replica)
            else:
                replica.answered()
                return scores
            finally:
                replica.load -= 1
                self._freed.set()  # each row that waits looks again
                self._freed = asyncio.Event()
        raise EngineLostError(
            f"{request.id} was lost in {self.max_attempts} attempts, the last time: {last}",
            key="actor_rollout_ref.rollout.server.max_attempts",
            fix="Do the servers run? actor_rollout_ref.rollout.server.timeout is the time limit of an attempt.",
        ) from last

    async def _scored_by(self, replica: ScoringReplica, request: ScoreRequest) -> Scores:
        assert replica.sampler is not None, "it is up"
        try:
            scores = await replica.sampler.score(request)
        except EngineLostError:
            raise
        except RolloutError as error:
            message = f"{replica.name} does not score {request.id}: {error.message}"
            raise type(error)(message, key=error.key, got=error.got, allowed=error.allowed, fix=error.fix) from error
        wrong = invalid_scores(request, scores, self.vocab_size)
        if wrong:
            raise RolloutError(
                f"the answer of {replica.name} is not the score of {request.id}: {wrong}",
                fix="Does it serve a model with the policy's tokenizer and vocabulary?",
            )
        return scores

    async def _choose(self, losers: Sequence[ScoringReplica]) -> ScoringReplica:
        """The least loaded server that is up, one that has not lost the row if there is any, once it has a free place.

        Raises:
            EngineLostError: none is up, and none will be.
        """
        has_paused = False
        while True:
            starts = {replica: replica.mending() for replica in self.replicas}
            is_up = [replica for replica, start in starts.items() if start is None]
            now = time.monotonic()
            avoided = {r: (r in losers, now < max(r.lost_at + AVOIDED_SECONDS, r.rests_until)) for r in is_up}
            # A row waits for a good server sooner than it spends an attempt at one that has just lost rows.
            best_of_up = [r for r in is_up if avoided[r] == min(avoided.values())]
            with_room = [r for r in best_of_up if r.load < self.slots]
            if not with_room:
                await self._wait(starts)
                continue
            best = min(with_room, key=lambda r: r.load)
            pause, rounds = best.rests_until - now, losers.count(best)
            if rounds and not has_paused:
                pause = max(pause, min(LONGEST_DELAY, self.retry_delay * 2 ** (rounds - 1)))
            if pause <= 0:
                return best
            await asyncio.sleep(pause)
            has_paused = True  # its process may have ended meanwhile

    async def _wait(self, starts: Mapping[ScoringReplica, Future[None] | None]) -> None:
        """Until a place is free, or one that starts is up or has failed to come up."""
        coming = [asyncio.wrap_future(start) for start in starts.values() if start is not None and not start.done()]
        if not coming and None not in starts.values():
            reasons = "; ".join(f"{r.name}: {start.exception()}" for r, start in starts.items() if start is not None)
            raise EngineLostError(f"no server is left of {len(self.replicas)}: {reasons}")
        for start in coming:  # why it failed is reported once no other server is left
            start.add_done_callback(take_error)
        freed = asyncio.ensure_future(self._freed.wait())
        either: list[asyncio.Future[Any]] = [freed, *coming]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()

    def close(self) -> None:
        """End the servers that were started here."""
        for replica in self.replicas:
            replica.close()
