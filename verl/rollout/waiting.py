"""Requests that wait for a slot at a replica: which one is next.

Consumes: requests, and the word that one began or ended. Waits for: a slot. Unblocked by: `Queue.call_next`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from verl.rollout.base import Request

OLDEST_EVERY = 8
"""At this interval of calls the oldest request goes next, so that none starves."""


@dataclass
class Samples:
    """What is known of a prompt's samples: when those that run began, and how long the others took."""

    began: dict[int, float] = field(default_factory=dict)
    ended: int = 0
    seconds: float = 0.0

    def expected(self, now: float) -> float:
        """Seconds that one more takes: the mean of those that ended, or at least as long as one that still runs."""
        mean = self.seconds / self.ended if self.ended else 0.0
        first = next(iter(self.began.values()), now)  # entries are in order of time
        return max(mean, now - first)


@dataclass
class Waiter:
    """One request that waits; its turn is False where it was aborted."""

    id: str
    arrival: int
    turn: asyncio.Future[bool]


class Queue:
    """Requests that wait for a slot; the one whose answer is expected to take longest goes first.

    A batch ends with its last answer, so a long one must not begin last (longest processing time first: Graham 1969,
    Bounds on multiprocessing timing anomalies). The length of an answer is not known before it ends, but samples of a
    prompt resemble each other: one sample of each prompt goes first, and how long they take says whose others go next.
    The order changes no token.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._waiting: dict[str, deque[Waiter]] = {}
        self._samples: dict[str, Samples] = {}
        self._arrivals = 0
        self._calls = 0

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
        line = self._waiting.setdefault(_prompt(request), deque())
        if line and arrival < line[0].arrival:
            line.appendleft(waiter)
        else:
            line.append(waiter)
        try:
            return await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled():
                self.call_next()  # pass its turn on
            raise

    def call_next(self) -> None:
        """A slot is free: the next one's turn."""
        self._calls += 1
        line = self._oldest() if self._calls % OLDEST_EVERY == 0 else self._longest()
        if line:
            line.popleft().turn.set_result(True)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """End the wait of these requests (of all, if None); how many there were."""
        waiters = [waiter for line in self._waiting.values() for waiter in line if not waiter.turn.done()]
        aborted = [waiter for waiter in waiters if request_ids is None or waiter.id in request_ids]
        for waiter in aborted:
            waiter.turn.set_result(False)
        return len(aborted)

    def _oldest(self) -> deque[Waiter] | None:
        return min((line for _, line in self._lines()), key=lambda line: line[0].arrival, default=None)

    def _longest(self) -> deque[Waiter] | None:
        now = self._clock()
        longest, chosen = -1.0, None
        for prompt, line in self._lines():
            samples = self._samples.get(prompt)
            if samples is None:
                return line
            expected = samples.expected(now)
            if expected > longest:
                longest, chosen = expected, line
        return chosen

    def _lines(self) -> Iterator[tuple[str, deque[Waiter]]]:
        """The prompts of which samples wait, and those samples."""
        for prompt, line in list(self._waiting.items()):
            while line and line[0].turn.done():  # cancelled or aborted
                line.popleft()
            if line:
                yield prompt, line
            else:
                del self._waiting[prompt]
                self._forget(prompt)

    def began(self, request: Request, arrival: int) -> None:
        """A replica has the request."""
        self._samples.setdefault(_prompt(request), Samples()).began[arrival] = self._clock()

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
        self._forget(prompt)

    def _forget(self, prompt: str) -> None:
        """Drop what is known of a prompt of which nothing waits or runs."""
        samples = self._samples.get(prompt)
        if samples and not samples.began and prompt not in self._waiting:
            del self._samples[prompt]


def _prompt(request: Request) -> str:
    return request.uid or request.id
