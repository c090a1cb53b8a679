"""One stream of weights for several receivers: each bucket is made once and gone before the next one is made.

Consumes: a stream of chunks. Waits for: the slowest receiver of a bucket, or the end of one that fails. Unblocked by:
whoever is the last to ask for the next bucket makes it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Protocol

from verl.weight_sync.chunks import WeightChunk, taking


class StreamReceiver(Protocol):
    """What takes weights: every sampler does."""

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None: ...


class Branch(Iterator[WeightChunk]):
    """The stream as one of its receivers sees it. Close it if the rest is not wanted, so that the others go on."""

    def __init__(self, source: _Source, number: int):
        self._source, self._number = source, number

    def __next__(self) -> WeightChunk:
        return self._source.next_of(self._number)

    def close(self) -> None:
        """Ask for no more."""
        self._source.leave(self._number)


class _Source:
    """A stream and what of it each branch has. One lock; no branch holds it while another one works on a chunk."""

    def __init__(self, chunks: Iterable[WeightChunk], number: int):
        self._chunks = iter(chunks)
        self._asked = dict.fromkeys(range(number), 0)
        """Branches that want more -> how many chunks they asked for."""
        self._made = 0
        self._chunk: WeightChunk | None = None
        self._end: BaseException | None = None
        self._change = threading.Condition()  # the branches' threads: the last that asks makes a chunk, the rest wait

    def next_of(self, branch: int) -> WeightChunk:
        with self._change:
            if branch not in self._asked:
                raise StopIteration
            self._asked[branch] += 1
            wanted = self._asked[branch]
            self._make_if_all_wait()
            self._change.wait_for(lambda: self._made >= wanted or self._end is not None)
            if self._made >= wanted:
                assert self._chunk is not None
                return self._chunk
            self._asked.pop(branch)
            assert self._end is not None
            raise StopIteration if isinstance(self._end, StopIteration) else self._end

    def leave(self, branch: int) -> None:
        with self._change:
            if self._asked.pop(branch, None) is None:
                return
            if self._asked:
                self._make_if_all_wait()
            elif self._end is None:  # nobody is left: whoever makes the stream is told
                self._end, self._chunk = StopIteration(), None
                with taking(self._chunks):
                    pass

    def _make_if_all_wait(self) -> None:
        """The next chunk, once every branch has asked for it and so has let go of the last one."""
        if self._end is not None or any(asked <= self._made for asked in self._asked.values()):
            return
        self._chunk = None
        try:
            self._chunk = next(self._chunks)
            self._made += 1
        except BaseException as error:  # carried over to every branch, as the end of the stream is
            self._end = error
        self._change.notify_all()


def fan_out(chunks: Iterable[WeightChunk], number: int) -> list[Branch]:
    """The same stream ``number`` times, in step: at most one chunk of it is alive.

    The branches wait for each other, so each is read in a thread of its own; one that stops early must be closed.
    What the source raises, each branch raises.
    """
    source = _Source(chunks, number)
    return [Branch(source, branch) for branch in range(number)]


async def deliver(
    receivers: Sequence[StreamReceiver], chunks: Iterable[WeightChunk], version: int
) -> list[Exception | None]:
    """Give a stream to all receivers; one that fails leaves the others their weights.

    One receiver is called here; several are called each in a thread and an event loop of its own, so nothing else may
    use them meanwhile. With none the stream is read to its end all the same, because other ranks may take part in it.

    Returns:
        What went wrong with each receiver, None where nothing did.
    """
    if not receivers:
        for _ in chunks:
            pass
        return []
    if len(receivers) == 1:
        outcomes = list(await asyncio.gather(receivers[0].update_weights(chunks, version), return_exceptions=True))
    else:
        branches = fan_out(chunks, len(receivers))
        # Each needs its thread before any of them goes on, and the loop's own threads may be fewer than receivers.
        threads = ThreadPoolExecutor(len(receivers), thread_name_prefix="verl-deliver")
        loop = asyncio.get_running_loop()
        work = [
            loop.run_in_executor(threads, copy_context().run, _taken, receiver, branch, version)
            for receiver, branch in zip(receivers, branches)
        ]
        try:
            outcomes = await asyncio.gather(*work, return_exceptions=True)
        finally:
            for branch in branches:
                branch.close()
            threads.shutdown(wait=False)
    return [_as_failure(outcome) for outcome in outcomes]


def _taken(receiver: StreamReceiver, branch: Branch, version: int) -> None:
    try:
        asyncio.run(receiver.update_weights(branch, version))
    finally:
        branch.close()


def _as_failure(outcome: BaseException | None) -> Exception | None:
    if outcome is None or isinstance(outcome, Exception):
        return outcome
    raise outcome
