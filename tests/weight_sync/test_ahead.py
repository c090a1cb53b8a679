"""A stream that a thread reads before its receiver asks: the same values in order, bounded, and ended for all."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from verl.errors import RolloutError
from verl.weight_sync import ReadAhead, WeightChunk

COUNT, BYTES = 6, 40


class Stream:
    """Chunks in one and the same memory, as of a transport; what was asked for, and whether it was closed."""

    def __init__(self, fails_at: int | None = None):
        self.asked, self.fails_at, self.is_closed = 0, fails_at, threading.Event()

    def __iter__(self):
        memory = torch.empty(BYTES // 4)
        try:
            for number in range(COUNT):
                self.asked += 1
                if number == self.fails_at:
                    raise RolloutError("the trainer gave up")
                memory.fill_(number)
                yield WeightChunk(3, [("w", memory)], last=number == COUNT - 1)
        finally:
            self.is_closed.set()


def settled(stream: Stream, asked: int) -> None:
    end = time.monotonic() + 10
    while stream.asked < asked:
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(0.02)


@pytest.mark.parametrize("room, asked", [(0, 1), (BYTES * 2, 3), (BYTES * 2 + 8, 3), (BYTES * 9, COUNT)])
def test_copies_of_so_many_bytes_are_made_ahead_and_the_receiver_sees_the_same_stream(room, asked):
    stream = Stream()
    ahead = ReadAhead(stream, room)
    settled(stream, asked)
    assert stream.asked == asked
    taken = []
    for chunk in ahead:
        taken.append((chunk.version, chunk.last, *chunk.tensors[0][1].tolist()))
        if len(taken) == 1:
            time.sleep(0.02)
            assert stream.asked <= max(asked, 2), "from its first question on nothing more is copied"
    assert taken == [(3, number == COUNT - 1, *[float(number)] * (BYTES // 4)) for number in range(COUNT)]
    assert stream.is_closed.wait(10)
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("room", [0, BYTES * 9])
def test_an_error_of_the_stream_comes_after_what_was_read_before_it(room):
    ahead, taken = ReadAhead(Stream(fails_at=2), room), []
    with pytest.raises(RolloutError, match="the trainer gave up"):
        while True:
            taken.append(next(ahead).tensors[0][1][0].item())
    assert taken == [0, 1]


@pytest.mark.parametrize("room, taken", [(0, 0), (0, 2), (BYTES * 2, 0), (BYTES * 2, 1), (BYTES * 9, 0)])
def test_whoever_wants_no_more_closes_the_stream(room, taken):
    stream = Stream()
    ahead = ReadAhead(stream, room)
    for _ in range(taken):
        next(ahead)
    ahead.close()
    assert stream.is_closed.wait(10)
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()
