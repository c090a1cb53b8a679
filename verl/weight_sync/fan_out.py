"""One stream of weights for several receivers: each bucket is made once and gone before the next one is made.

Consumes: a stream of chunks. Waits for: the slowest receiver of a bucket, or the end of one that fails. Unblocked by:
the last receiver to request the next bucket, which makes it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Protocol

from verl.metrics import notice
from verl.outcomes import settle
from verl.weight_sync.chunks import WeightChunk, taking

END_SECONDS = 10.0
"""That receivers may take to release an update that was cancelled."""


class StreamReceiver(Protocol):
    """What takes weights: every sampler does."""

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None: ...


class Branch(Iterator[WeightChunk]):
    """The stream as one of its receivers sees it. Close it if the rest is not needed, so that the others continue."""

    def __init__(self, source: _Source, number: int):
        self._source, self._number = source, number

    def __next__(self) -> WeightChunk:
        return self._source.next_of(self._number)

    def close(self) -> None:
        """Request no more."""
        self._source.leave(self._number)


class _Source:
    """A stream and what of it each branch has. One lock; no branch holds it while another one works on a chunk."""

    def __init__(self, chunks: Iterable[WeightChunk], number: int):
        self._chunks = iter(chunks)
        self._requested = dict.fromkeys(range(number), 0)
        """Open branches -> the number of chunks that they requested."""
        self._made = 0
        self._chunk: WeightChunk | None = None
        self._end: BaseException | None = None
        self._change = threading.Condition()  # the branches' threads: the last to request makes a chunk, the rest wait

    def next_of(self, branch: int) -> WeightChunk:
        with self._change:
            if branch not in self._requested:
                raise StopIteration
            self._requested[branch] += 1
            number = self._requested[branch]
            self._make_if_all_wait()
            self._change.wait_for(lambda: self._made >= number or self._end is not None)
            if self._made >= number:
                assert self._chunk is not None
                return self._chunk
            self._requested.pop(branch)
            assert self._end is not None
            raise StopIteration if isinstance(self._end, StopIteration) else self._end

    def leave(self, branch: int) -> None:
        with self._change:
            if self._requested.pop(branch, None) is None:
                return
            if self._requested:
                self._make_if_all_wait()
            elif self._end is None:  # no branch is left: close the producer of the stream
                self._end, self._chunk = StopIteration(), None
                with taking(self._chunks):
                    pass

    def stop(self) -> None:
        """The stream ends here for every branch, as one that was interrupted."""
        with self._change:
            if self._end is None:
                self._end = StopIteration()
                with taking(self._chunks):
                    pass
            self._change.notify_all()

    def _make_if_all_wait(self) -> None:
        """The next chunk, once every branch has requested it and released the last one."""
        if self._end is not None or any(number <= self._made for number in self._requested.values()):
            return
        self._chunk = None
        made: Future[WeightChunk] = Future()
        settle(made, lambda: next(self._chunks))
        self._end = made.exception()  # every branch raises it, as it does the end of the stream
        if self._end is None:
            self._chunk = made.result()
            self._made += 1
        self._change.notify_all()


class _Taker:
    """One receiver in a thread and an event loop of its own, which do not keep the process from ending."""

    def __init__(self, receiver: StreamReceiver, branch: Branch, version: int):
        self._receiver, self._branch, self._version = receiver, branch, version
        self._task: asyncio.Task[None] | None = None
        self.outcome: Future[None] = Future()
        self.outcome.set_running_or_notify_cancel()  # who waits for it may be cancelled, it may not
        threading.Thread(target=copy_context().run, args=(self._run,), name="verl-deliver", daemon=True).start()

    def cancel(self) -> None:
        """Ask the receiver to release the stream."""
        if self._task is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        settle(self.outcome, self._deliver)

    def _deliver(self) -> None:
        try:
            asyncio.run(self._take())
        finally:
            self._branch.close()  # before the outcome is there

    async def _take(self) -> None:
        self._task = asyncio.current_task()
        await self._receiver.update_weights(self._branch, self._version)


async def deliver(
    receivers: Sequence[StreamReceiver], chunks: Iterable[WeightChunk], version: int, names: Sequence[str] = ()
) -> list[Exception | None]:
    """Give a stream to all receivers; one that fails leaves the others their weights.

    One receiver is called here; several are called each in a thread and an event loop of its own, so nothing else may
    use them meanwhile. With none the stream is read to its end all the same, because other ranks may take part in it.
    If it is cancelled, all receivers are; one that does not end within `END_SECONDS` is left alone, with a notice.

    Args:
        names: of the receivers, for that notice.

    Returns:
        What went wrong with each receiver, None where nothing did.
    """
    if not receivers:
        for _ in chunks:
            pass
        return []
    if len(receivers) == 1:
        outcomes = list(await asyncio.gather(receivers[0].update_weights(chunks, version), return_exceptions=True))
        return [_as_failure(outcome) for outcome in outcomes]
    source = _Source(chunks, len(receivers))
    takers = [_Taker(receiver, Branch(source, number), version) for number, receiver in enumerate(receivers)]
    try:
        outcomes = list(await _outcomes(takers))
    except BaseException:
        # In a thread: the lock is held while a chunk is made, and that may be what hangs.
        threading.Thread(target=source.stop, name="verl-deliver", daemon=True).start()
        for taker in takers:
            taker.cancel()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_outcomes(takers), END_SECONDS)
        for number, taker in enumerate(takers):
            if not taker.outcome.done():
                who = names[number] if names else f"receiver {number}"
                notice(f"weights, {who}", f"its update to version {version} was cancelled and did not end within "
                       f"{END_SECONDS:g} s: it is silent, and its thread is left behind")  # fmt: skip
        raise
    return [_as_failure(outcome) for outcome in outcomes]


def _outcomes(takers: Sequence[_Taker]) -> asyncio.Future[list[BaseException | None]]:
    return asyncio.gather(*(asyncio.wrap_future(taker.outcome) for taker in takers), return_exceptions=True)


def _as_failure(outcome: BaseException | None) -> Exception | None:
    if outcome is None or isinstance(outcome, Exception):
        return outcome
    raise outcome
