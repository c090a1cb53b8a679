"""A sampler in an event loop and a thread of its own, for samplers that compute in their event loop's thread.

Consumes: calls from any event loop. Waits for: nothing; who calls waits for the other loop's answer. Unblocked by: that
answer. A process that answers others hears a call at once, and not after a forward pass for each turn of the loop that
the call takes: weights reach a sampler that is sampling about as fast as one that is not.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from verl.rollout.base import Completion, Request, Sampler
from verl.weight_sync import WeightChunk

T = TypeVar("T")
END_SECONDS = 5.0
"""That a forward pass may take to its end when the sampler is no longer used."""


class ApartSampler(Sampler):
    """The same sampler, which from here on is used through this object alone.

    Requests of one turn of the caller's loop arrive together, so that they join the same forward pass. New weights that
    interrupt requests do not wait for the end of the pass in work, which is left at its next layer.

    Args:
        sampler: of this process.

    Example:
        >>> sampler = ApartSampler(HFSampler("path/to/model"))
    """

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.at_update, self.logprobs_mode = sampler.at_update, sampler.logprobs_mode
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-sampler", daemon=True)
        self._thread.start()
        # Also at the end of the process: a thread that is in native code then would end it with an error.
        self._finish = weakref.finalize(self, _end, self._loop, self._thread)
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Future[None]] = {}

    @property
    def version(self) -> int:
        return self.sampler.version

    async def generate(self, request: Request) -> Completion:
        mine = asyncio.get_running_loop()
        gate = self._gates.get(mine)
        if gate is None:
            gate = self._gates[mine] = self._loop.create_future()
            mine.call_soon(mine.call_soon, self._open, mine)  # two turns, as the engine waits for its first requests
        return await self._call(self._enter(gate, request))

    async def _enter(self, gate: asyncio.Future[None], request: Request) -> Completion:
        await asyncio.shield(gate)  # a request that is cancelled leaves it to the others
        return await self.sampler.generate(request)

    def _open(self, caller: asyncio.AbstractEventLoop) -> None:
        """Let the requests in that a loop has made so far."""
        gate = self._gates.pop(caller, None)
        if gate is not None:
            self._loop.call_soon_threadsafe(gate.set_result, None)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        if self.at_update != "wait":
            self.sampler.expect_call()
        await self._after_requests(lambda: self.sampler.update_weights(chunks, version))

    async def confirm(self, version: int) -> int:
        return self.sampler.version

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        wanted = None if request_ids is None else list(request_ids)
        return await self._after_requests(lambda: self.sampler.abort(wanted))

    async def sleep(self, level: int = 1) -> None:
        await self._after_requests(lambda: self.sampler.sleep(level))

    async def wake(self) -> None:
        await self._after_requests(self.sampler.wake)

    def stats(self) -> dict[str, float]:
        return self.sampler.stats()

    def close(self) -> None:
        """End the thread, after the forward pass that it is in."""
        self._finish()

    async def _after_requests(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a call that comes behind the requests that were made before it."""
        self._open(asyncio.get_running_loop())
        return await self._call(_begun(begin))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


def apart(sampler: Sampler) -> Sampler:
    """The sampler for a process that also answers others: in a loop of its own if it would keep this one."""
    return ApartSampler(sampler) if sampler.computes_in_loop else sampler


async def _begun(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await begin()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(_leave, loop)
    if thread is not threading.current_thread():
        thread.join(END_SECONDS)
    if not thread.is_alive():
        loop.close()


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is in flight, and stop once it has let go."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.call_soon, loop.stop)
