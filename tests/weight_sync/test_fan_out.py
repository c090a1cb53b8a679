"""One stream for several receivers: nobody holds it, nobody waits for one that failed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref

import pytest
import torch

from verl.errors import RolloutError
from verl.metrics import notices, reset_notices
from verl.weight_sync import chunk_weights, deliver

COUNT, BYTES, BUCKET = 12, 400, 1000


class Alive:
    """Tensors of `BYTES` each, and the most bytes of them that were alive at once."""

    def __init__(self):
        self.now = self.most = self.made = 0
        self.lock = threading.Lock()

    def __iter__(self):
        for number in range(COUNT):
            tensor = torch.full((BYTES // 4,), float(number))
            with self.lock:
                self.now, self.made = self.now + BYTES, self.made + 1
                self.most = max(self.most, self.now)
            weakref.finalize(tensor, self._gone)
            yield f"w{number}", tensor
            del tensor

    def _gone(self):
        with self.lock:
            self.now -= BYTES


class Receiver:
    """Reads like a sampler: bucket by bucket, copying."""

    def __init__(self, fails_after=None):
        self.seen, self.fails_after = [], fails_after

    async def update_weights(self, chunks, version):
        taken = 0
        for chunk in chunks:
            if taken == self.fails_after:
                raise RolloutError("this one fails")
            taken += 1  # noqa: SIM113 -- enumerate would hold the chunk
            assert chunk.version == version
            self.seen += [(name, float(tensor[0])) for name, tensor in chunk.tensors]
            del chunk


WHOLE = [(f"w{number}", float(number)) for number in range(COUNT)]


def delivered(receivers, source, bucket=BUCKET):
    return asyncio.run(deliver(receivers, chunk_weights(source, bucket, 3), 3))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_every_receiver_gets_the_stream_and_at_most_a_bucket_and_a_weight_of_it_is_alive(number):
    source, receivers = Alive(), [Receiver() for _ in range(number)]
    assert delivered(receivers, source) == [None] * number
    assert all(receiver.seen == WHOLE for receiver in receivers)
    assert source.made == COUNT and source.most <= BUCKET // BYTES * BYTES + BYTES and source.now == 0


async def test_more_receivers_than_an_event_loop_has_threads_of_its_own_are_served():
    receivers = [Receiver() for _ in range((os.cpu_count() or 1) + 5)]  # one more than `ThreadPoolExecutor()` has

    errors = await asyncio.wait_for(deliver(receivers, chunk_weights(Alive(), BUCKET, 3), 3), 20)
    assert errors == [None] * len(receivers)
    assert all(receiver.seen == WHOLE for receiver in receivers)


@pytest.mark.parametrize("fails_after", [0, 2])
def test_a_receiver_that_fails_holds_nobody_up(fails_after):
    receivers = [Receiver(), Receiver(fails_after), Receiver()]
    first, second, third = delivered(receivers, Alive())
    assert first is third is None and "this one fails" in str(second)
    assert receivers[0].seen == receivers[2].seen == WHOLE


def test_one_that_refuses_before_it_reads_anything_holds_nobody_up():
    class Refusing:
        async def update_weights(self, chunks, version):
            raise RolloutError("not now")

    receiver = Receiver()
    assert [str(e) for e in delivered([Refusing(), receiver], Alive()) if e] == ["not now"]
    assert receiver.seen == WHOLE


def test_where_all_fail_the_source_is_told_and_goes_no_further():
    closed = threading.Event()

    def source():
        try:
            yield from Alive()
        finally:
            closed.set()

    assert all(delivered([Receiver(1), Receiver(1)], source(), BYTES))
    assert closed.is_set()


def test_what_the_source_raises_reaches_every_receiver():
    def broken():
        yield "w", torch.ones(100)
        yield "v", torch.ones(100)
        raise RolloutError("the trainer's own error")

    found = delivered([Receiver(), Receiver()], broken(), 400)
    assert [str(error) for error in found] == ["the trainer's own error"] * 2


def test_without_a_receiver_the_stream_is_made_all_the_same():
    source = Alive()
    assert delivered([], source) == [] and source.made == COUNT


def test_an_update_that_is_cancelled_ends_and_names_the_receiver_that_is_silent(monkeypatch):
    """Of the two others one waits for the next chunk in its thread, the other for an answer in its event loop."""
    monkeypatch.setattr(sys.modules[deliver.__module__], "END_SECONDS", 2.0)
    release, cancelled, begun = threading.Event(), threading.Event(), []

    class Stuck:
        async def update_weights(self, chunks, version):
            next(chunks)
            begun.append(self)
            release.wait(30)

    class Waiting:
        async def update_weights(self, chunks, version):
            next(chunks)
            begun.append(self)
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.set()
                raise

    async def run(receivers, names):
        work = asyncio.ensure_future(deliver(receivers, chunk_weights(Alive(), BUCKET, 3), 3, names))
        while not set(receivers[1:]) <= set(begun):
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(work, 20)

    reset_notices()
    asyncio.run(run([Receiver(), Waiting()], ["a", "b"]))
    assert cancelled.is_set() and not notices()
    asyncio.run(run([Receiver(), Stuck(), Waiting()], ["a", "b", "c"]))
    ((who, said),) = notices().items()
    left = [thread for thread in threading.enumerate() if thread.name == "verl-deliver"]
    release.set()
    assert who == "weights, b" and "update to version 3 was cancelled" in said
    assert all(thread.daemon for thread in left), "the process can end"
