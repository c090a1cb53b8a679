"""Whether a sampler may sample, and with which weights: what every sampler that holds an engine keeps of itself.

Consumes: nothing. Waits for: a request waits at a shut `Gate`, an update until the last request inside has left.
Unblocked by: the end of the update, the end of the last request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from verl.errors import RolloutError
from verl.rollout.change import ChangeEvent
from verl.rollout.lost import EngineLostError

LEVELS = (1, 2)
"""Of sleep: the cache; the cache and the weights."""


class Readiness:
    """Version, sleep and half-finished updates of one sampler.

    Attributes:
        version: of the weights.
        is_asleep: nothing is sampled until `wake`.
        broken: why nothing can be sampled until full weights arrive; None if it can.
        lost: why the engine can no longer sample; None if it can.
    """

    def __init__(self) -> None:
        self.version = 0
        self.is_asleep = False
        self.broken: str | None = None
        self.lost: str | None = None

    def check(self) -> None:
        """Raise `RolloutError` if nothing can be sampled now, `EngineLostError` if the engine is lost."""
        if self.lost is not None:
            raise EngineLostError(self.lost)
        reason = "it sleeps; call wake() first" if self.is_asleep else self.broken
        if reason is not None:
            raise RolloutError(f"the sampler cannot sample: {reason}")

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """While weights arrive, and after an incomplete transfer, nothing can be sampled."""
        self.broken = f"the update of its weights to version {version} did not finish; send them again"
        yield
        self.broken, self.version = None, version

    def enter_sleep(self, level: int) -> None:
        """The memory of this level was freed."""
        self.is_asleep = True
        if level == LEVELS[-1]:
            self.broken = "its weights were freed by sleep(2); send new ones with update_weights"


class Gate:
    """Admits requests while open; an update shuts it and waits until the last one has left."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_shut = False
        self._change = ChangeEvent()

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """The place of one request."""
        while self._is_shut:
            await self._change.wait()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._change.tell()

    @asynccontextmanager
    async def shut(self, interrupt: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[None]:
        """No request is inside.

        Args:
            interrupt: makes the requests inside leave before their end; None waits for it.
        """
        if self._is_shut:
            raise RolloutError("another update of the weights, or sleep, is under way")
        self._is_shut = True
        try:
            if interrupt is not None and self._inside:
                await interrupt()
            while self._inside:
                await self._change.wait()
            yield
        finally:
            self._is_shut = False
            self._change.tell()


def check_level(level: int) -> None:
    """Raise `RolloutError` for a level of sleep that is none."""
    if level not in LEVELS:
        raise RolloutError("no such sleep level", key="level", got=level, allowed="1 (cache), 2 (cache and weights)")
