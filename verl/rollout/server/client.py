"""Requests to one server with a time limit and a few attempts, and none while it is known to be down."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from verl.errors import RolloutError
from verl.json_text import Json
from verl.rollout.lost import EngineBusyError, EngineLostError, EngineSilentError
from verl.serving.client import LONGEST_DELAY, Client, Reply, ServerBusyError, WireError

T = TypeVar("T")
BUSY = (408, 425, 429, 502, 503, 504)
SHOWN = 300


class HttpClient(Client):
    """A `Client` of a server that samples."""

    async def ask(self, method: str, path: str, payload: Json | None = None, timeout: float = 60.0) -> Reply:
        """One attempt.

        Raises:
            EngineBusyError: the server has too many connections. EngineLostError: no answer, or none in time.
        """
        return await self._heard(super().ask(method, path, payload, timeout), path, timeout)

    async def proves(self, key: str, timeout: float = 60.0) -> bool:
        """As the base class.

        Raises:
            EngineLostError: no answer, none in time, or a wrong proof.
        """
        return await self._heard(super().proves(key, timeout), "", timeout)

    async def _heard(self, work: Awaitable[T], path: str, timeout: float) -> T:
        try:
            return await work
        except TimeoutError as error:
            raise EngineSilentError(f"{self.url}{path} did not answer within {timeout:g} s") from error
        except (OSError, WireError) as error:
            kind = EngineBusyError if isinstance(error, ServerBusyError) else EngineLostError
            raise kind(f"{self.url}{path} is not answering: {error or type(error).__name__}") from error


class Breaker:
    """Keeps requests away from a server that failed several times in a row.

    After ``threshold`` failures it is open for ``cooldown`` seconds; then one request may try. Its success closes it,
    its failure opens it again.
    """

    def __init__(self, threshold: int = 5, cooldown: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self.threshold, self.cooldown, self._clock = threshold, cooldown, clock
        self._failures = 0
        self._closed_until: float | None = None

    @property
    def is_open(self) -> bool:
        return self._failures >= self.threshold

    def seconds_to_wait(self) -> float:
        """0 if a request may go; it must then report `succeeded` or `failed`."""
        if not self.is_open:
            return 0.0
        now = self._clock()
        if self._closed_until is None or now >= self._closed_until:
            self._closed_until = now + self.cooldown  # this one tries, the others wait for its result
            return 0.0
        return self._closed_until - now

    def succeeded(self) -> None:
        self._failures, self._closed_until = 0, None

    def failed(self) -> None:
        self._failures += 1
        if self.is_open:
            self._closed_until = self._clock() + self.cooldown


class Retrying:
    """Attempts until one succeeds, at most ``max_attempts``, with growing pauses of random length between them.

    With one attempt the caller has other servers: an open breaker is then an error at once.

    Args:
        delay: seconds of the first pause on average; each is twice as long as the one before.
    """

    def __init__(self, max_attempts: int = 3, delay: float = 2.0, breaker: Breaker | None = None):
        self.max_attempts, self.delay = max_attempts, delay
        self.breaker = breaker or Breaker()
        self.num_retries = 0
        self._random = random.Random()

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds.

        Raises:
            EngineLostError: the last attempt's, with how many there were.
        """
        last: EngineLostError | None = None
        for number in range(self.max_attempts):
            if number:
                self.num_retries += 1
                await asyncio.sleep(self._pause(number, last))
            wait = self.breaker.seconds_to_wait()
            if wait > 0:
                last = last or EngineLostError("the server failed several times in a row and is left alone for a while")
                if self.max_attempts == 1:
                    raise last
                await asyncio.sleep(wait * self._random.uniform(1.0, 1.2))
                if self.breaker.seconds_to_wait() > 0:
                    continue
            try:
                result = await attempt()
            except EngineLostError as error:
                self.breaker.failed()
                last = error
            except RolloutError:
                self.breaker.succeeded()  # it refused the request, so it is up
                raise
            else:
                self.breaker.succeeded()
                return result
        assert last is not None
        times = "once" if self.max_attempts == 1 else f"{self.max_attempts} times"
        raise EngineLostError(f"{last.message} (tried {times})", key=last.key, fix=last.fix) from last

    def _pause(self, number: int, last: EngineLostError | None) -> float:
        retry_after = last.got if isinstance(last, EngineBusyError) and isinstance(last.got, float) else 0.0
        backoff = self.delay * 2 ** (number - 1)
        return min(LONGEST_DELAY, max(retry_after, backoff * self._random.uniform(0.5, 1.5)))


def checked_json(answer: Reply, where: str) -> Any:
    """The JSON of an answer with a good status.

    Raises:
        EngineBusyError, EngineLostError: the server cannot answer now.
        RolloutError: the server refuses the request; asking again would not help.
    """
    if 200 <= answer.status < 300:
        try:
            return answer.json() if answer.body else {}
        except WireError as error:
            raise EngineLostError(f"{where} answered with something else than JSON: {error}") from error
    message = reason(answer)
    if answer.status in BUSY:
        raise EngineBusyError(f"{where} answered {answer.status}: {message}", got=answer.retry_after or None)
    if answer.status >= 500:
        raise EngineLostError(f"{where} answered {answer.status}: {message}")
    raise RolloutError(f"{where} refuses the request ({answer.status}): {message}", got=None)


def reason(answer: Reply) -> str:
    """The message of an error, in the forms that servers use."""
    try:
        content = answer.json()
    except WireError:
        return answer.body[:SHOWN].decode("utf-8", "replace").strip() or "no reason given"
    for name in ("error", "message", "detail"):
        while isinstance(content, dict) and name in content:
            content = content[name]
    return str(content)[:SHOWN]
