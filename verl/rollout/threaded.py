"""A sampler in a separate event loop and thread, for samplers that compute in their event loop's thread.

Consumes: calls from any event loop. Waits for: nothing; who calls waits for the other loop's answer. Unblocked by: that
answer. A process that answers others hears a call at once, and not after a forward pass for each turn of the loop that
the call takes: weights reach a sampler that is sampling about as fast as one that is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, TypeVar

from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.scores import ScoreRequest, Scores
from verl.weight_sync import WeightChunk

T = TypeVar("T")
END_SECONDS = 5.0
"""That a forward pass may take to its end when the sampler is no longer used."""


class ThreadedSampler(Sampler):
    """The same sampler, which from here on is used through this object alone.

    Requests of one turn of the caller's loop arrive together, so that they join the same forward pass. New weights that
    interrupt requests do not wait for the end of the pass in work, which is left at its next layer.

    Args:
        sampler: of this process.

    Example:
        >>> sampler = ThreadedSampler(HFSampler("path/to/model"))
    """

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.at_update, self.logprobs_mode = sampler.at_update, sampler.logprobs_mode
        self.picture_fields = sampler.picture_fields
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-sampler", daemon=True)
        self._thread.start()
        # Also at the end of the process: a thread that is in native code then would end it with an error.
        self._finish = weakref.finalize(self, _end, self._loop, self._thread)
        self._gathered: dict[asyncio.AbstractEventLoop, list[_Call[Any]]] = {}

    @property
    def version(self) -> int:
        return self.sampler.version

    async def generate(self, request: Request) -> Completion:
        return await self._gather(lambda: self.sampler.generate(request))

    async def score(self, request: ScoreRequest) -> Scores:
        return await self._gather(lambda: self.sampler.score(request))

    async def _gather(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of a call that begins together with the others of this turn."""
        loop = asyncio.get_running_loop()
        if loop not in self._gathered:
            self._gathered[loop] = []
            loop.call_soon(loop.call_soon, self._send, loop)  # two turns, as the engine waits for its first requests
        call = _Call(begin, loop.create_future())
        self._gathered[loop].append(call)
        return await self._answer(call)

    def _send(self, caller: asyncio.AbstractEventLoop) -> None:
        """Let the calls in that a loop has made so far, in their order and in one turn of the sampler's loop."""
        calls = self._gathered.pop(caller, [])
        self._loop.call_soon_threadsafe(_begin_all, calls)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        if self.at_update != "wait":
            self.sampler.interrupt_pass()
        await self._after_requests(lambda: self.sampler.update_weights(chunks, version))

    async def confirm(self, version: int) -> int:
        return self.sampler.version

    async def drawn(self, known: Mapping[str, int]) -> dict[str, Completion]:
        call = _Call(lambda: self.sampler.drawn(known), asyncio.get_running_loop().create_future())
        # Past the calls that are gathered, which it would cut in two turns.
        self._loop.call_soon_threadsafe(call.begin)
        return await self._answer(call)

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        aborted = None if request_ids is None else list(request_ids)
        return await self._after_requests(lambda: self.sampler.abort(aborted))

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
        loop = asyncio.get_running_loop()
        call = _Call(begin, loop.create_future())
        self._gathered.setdefault(loop, []).append(call)
        self._send(loop)
        return await self._answer(call)

    async def _answer(self, call: _Call[T]) -> T:
        try:
            return await call.answer
        except asyncio.CancelledError:
            # Behind the calls before it and ahead of those after it: they do not meet what it was doing.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call.cancel)
            raise


class _Call(Generic[T]):
    """What the sampler's loop has to do, and its answer in the loop of the caller."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]):
        self.answer = answer
        self._begin = begin
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """In the sampler's loop, unless its caller is gone already."""
        if self.answer.cancelled():
            return
        self._task = asyncio.get_running_loop().create_task(self._begin())
        self._task.add_done_callback(self._send)

    def cancel(self) -> None:
        """In the sampler's loop."""
        if self._task is not None:
            self._task.cancel()

    def _send(self, task: asyncio.Task[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop was closed: the result has no waiter
            self.answer.get_loop().call_soon_threadsafe(self._arrive, task)

    def _arrive(self, task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.answer.done():
            return  # the caller was cancelled
        if task.cancelled():
            self.answer.cancel()
        elif error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())


def _begin_all(calls: list[_Call[Any]]) -> None:
    for call in calls:
        call.begin()


def threaded(sampler: Sampler) -> Sampler:
    """The sampler for a process that also answers others: in another loop and thread if it would block this one."""
    return ThreadedSampler(sampler) if sampler.computes_in_loop else sampler


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(_leave, loop)
    if thread is not threading.current_thread():
        thread.join(END_SECONDS)
    if not thread.is_alive():
        loop.close()


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is in flight, and stop once it has ended."""
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.call_soon, loop.stop)
