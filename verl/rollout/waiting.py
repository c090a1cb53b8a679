"""Requests that wait for a slot at a replica: which one is next.

Consumes: requests, and the word that one began or ended. Waits for: a slot. Unblocked by: `Queue.call_next`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from verl.outcomes import on_error
from verl.rollout.base import Request

OLDEST_EVERY = 8
"""At this interval of calls the oldest request goes next, so that none starves."""
SPARE = 64
"""Entries without use that a ranking may have, however few prompts wait."""


@dataclass
class Samples:
    """What is known of a prompt's samples: when those that run began, and how long the others took.

    One more takes the mean of those that ended, or at least as long as one that still runs.
    """

    began: dict[int, float] = field(default_factory=dict)
    ended: int = 0
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        return self.seconds / self.ended if self.ended else 0.0

    @property
    def first(self) -> float | None:
        """When the one that runs for longest began."""
        return next(iter(self.began.values()), None)  # entries are in order of time


@dataclass
class Waiter:
    """One request that waits; its turn is False where it was aborted."""

    id: str
    arrival: int
    turn: asyncio.Future[bool]


class Ranking:
    """Prompts by a rank that changes; the smallest is at hand, without a look at the others."""

    def __init__(self) -> None:
        self._ranks: dict[str, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], str]] = []
        """With ranks that were replaced; those are skipped."""

    def put(self, prompt: str, rank: tuple[float, int]) -> None:
        """Rank it, whatever its rank was."""
        if self._ranks.get(prompt) == rank:
            return
        self._ranks[prompt] = rank
        if len(self._heap) > 2 * len(self._ranks) + SPARE:
            self._heap = [(rank, prompt) for prompt, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, prompt))

    def drop(self, prompt: str) -> None:
        self._ranks.pop(prompt, None)

    def first(self) -> tuple[tuple[float, int], str] | None:
        """The smallest rank, and whose it is."""
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class Queue:
    """Requests that wait for a slot; the one whose answer is expected to take longest goes first.

    A batch ends with its last answer, so a long one must not begin last (longest processing time first: Graham 1969,
    Bounds on multiprocessing timing anomalies). The length of an answer is not known before it ends, but samples of a
    prompt resemble each other: one sample of each prompt goes first, and how long they take says whose others go next.
    The order changes no token. What a call costs does not grow with the requests that wait, but for a logarithm.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._waiting: dict[str, deque[Waiter]] = {}
        self._samples: dict[str, Samples] = {}
        self._arrivals = self._calls = self._lines = 0
        self._called: str | None = None
        self._places: dict[str, int] = {}
        """Of the prompts, in the order in which they began to wait: among equals the first one is next."""
        self._unknown, self._by_mean, self._by_first, self._by_arrival = (Ranking() for _ in range(4))

    def arrived(self) -> int:
        """The place of a request, which it keeps if it has to wait twice."""
        self._arrivals += 1
        return self._arrivals

    async def turn(self, request: Request, arrival: int) -> bool:
        """Return when the request is to look for a slot; False: it was aborted before it got one.

        Args:
            arrival: what `arrived` gave it.
        """
        waiter = Waiter(request.id, arrival, asyncio.get_running_loop().create_future())
        prompt = _prompt(request)
        line = self._waiting.setdefault(prompt, deque())
        if line and arrival < line[0].arrival:
            line.appendleft(waiter)
        else:
            line.append(waiter)
        if len(line) == 1:
            self._places[prompt] = self._lines = self._lines + 1
            self._rank(prompt)
        self._by_arrival.put(prompt, (line[0].arrival, 0))
        with on_error(lambda _: self._pass_on(waiter)):
            return await waiter.turn

    def _pass_on(self, waiter: Waiter) -> None:
        """Give the turn of one that left to the next one."""
        if waiter.turn.done() and not waiter.turn.cancelled():
            self.call_next()

    def call_next(self) -> None:
        """A slot is free: the next one's turn."""
        self._calls += 1
        choose = self._oldest if self._calls % OLDEST_EVERY == 0 else self._longest
        prompt = choose()
        while prompt is not None and self._trim(prompt):
            prompt = choose()
        if prompt is not None:
            self._waiting[prompt].popleft().turn.set_result(True)
            self._moved_up(prompt)
        called, self._called = self._called, prompt
        if called is not None:  # by now its request has begun, or never will
            self._forget(called)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """End the wait of these requests (of all, if None); how many there were."""
        waiters = [waiter for line in self._waiting.values() for waiter in line if not waiter.turn.done()]
        aborted = [waiter for waiter in waiters if request_ids is None or waiter.id in request_ids]
        for waiter in aborted:
            waiter.turn.set_result(False)
        return len(aborted)

    def _oldest(self) -> str | None:
        oldest = self._by_arrival.first()
        return None if oldest is None else oldest[1]

    def _longest(self) -> str | None:
        unknown, by_mean, by_first = self._unknown.first(), self._by_mean.first(), self._by_first.first()
        if unknown is not None:
            return unknown[1]
        if by_mean is None or by_first is None:
            return None if by_mean is None else by_mean[1]
        (mean, mean_place), (first, first_place) = by_mean[0], by_first[0]
        is_mean = (mean, mean_place) < (first - self._clock(), first_place)
        return by_mean[1] if is_mean else by_first[1]

    def _trim(self, prompt: str) -> bool:
        """Whether the first of a prompt's requests were cancelled or aborted; they are gone then."""
        line = self._waiting[prompt]
        if not line[0].turn.done():
            return False
        while line and line[0].turn.done():
            line.popleft()
        self._moved_up(prompt)
        self._forget(prompt)
        return True

    def _moved_up(self, prompt: str) -> None:
        """Another request of the prompt is the first of those that wait, or none is."""
        line = self._waiting[prompt]
        if line:
            return self._by_arrival.put(prompt, (line[0].arrival, 0))
        del self._waiting[prompt], self._places[prompt]
        for ranking in (self._unknown, self._by_mean, self._by_first, self._by_arrival):
            ranking.drop(prompt)

    def _rank(self, prompt: str) -> None:
        """After something became known of a prompt, or it began to wait."""
        if prompt not in self._waiting:
            return
        samples, place = self._samples.get(prompt), self._places[prompt]
        if samples is None:
            return self._unknown.put(prompt, (0.0, place))
        self._unknown.drop(prompt)
        self._by_mean.put(prompt, (-samples.mean, place))
        if samples.first is None:
            self._by_first.drop(prompt)
        else:
            self._by_first.put(prompt, (samples.first, place))

    def began(self, request: Request, arrival: int) -> None:
        """A replica has the request."""
        prompt = _prompt(request)
        self._samples.setdefault(prompt, Samples()).began[arrival] = self._clock()
        self._rank(prompt)

    def ended(self, request: Request, arrival: int, *, in_full: bool) -> None:
        """The request has left its replica.

        Args:
            in_full: the answer ended naturally; others give no estimate of such requests' length.
        """
        prompt = _prompt(request)
        samples = self._samples[prompt]
        start = samples.began.pop(arrival)
        if in_full:
            samples.ended += 1
            samples.seconds += self._clock() - start
        self._rank(prompt)
        self._forget(prompt)

    def _forget(self, prompt: str) -> None:
        """Drop what is known of a prompt of which nothing waits or runs."""
        samples = self._samples.get(prompt)
        if samples and not samples.began and prompt not in self._waiting:
            del self._samples[prompt]


def _prompt(request: Request) -> str:
    return request.uid or request.id
