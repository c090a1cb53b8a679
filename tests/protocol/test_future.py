"""Futures: references of any runtime, chunks of chunks, errors."""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from verl.errors import WorkerError
from verl.protocol import DataProto, DataProtoFuture, register_reference, resolve


def part(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)})


def done(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def test_get_waits_and_joins_the_parts_in_order():
    with ThreadPoolExecutor(2) as threads:
        future = DataProtoFuture.concat([threads.submit(part, 1, 2), threads.submit(part, 3, 4)])
        assert future.get().batch["x"].tolist() == [1, 2, 3, 4]


def test_chunks_select_equal_parts_of_the_whole_and_can_be_cut_again():
    future = DataProtoFuture.concat([done(part(1, 2, 3)), done(part(4, 5, 6, 7, 8))])
    halves = future.chunk(2)
    assert [h.get().batch["x"].tolist() for h in halves] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [q.get().batch["x"].tolist() for q in halves[1].chunk(2)] == [[5, 6], [7, 8]]


def test_the_exception_of_a_failed_part_is_raised_as_it_is():
    failed: Future = Future()
    failed.set_exception(KeyError("worker"))
    with pytest.raises(KeyError, match="worker"):
        DataProtoFuture.concat([done(part(1)), failed]).get()


class Ticket:
    """A reference of an invented runtime."""

    def __init__(self, value: DataProto):
        self.value = value


def test_a_runtime_registers_its_own_references_and_chunks_can_travel():
    with pytest.raises(WorkerError, match="Ticket"):
        resolve([Ticket(part(1))])
    register_reference(Ticket, lambda tickets: [ticket.value for ticket in tickets])
    half = pickle.loads(pickle.dumps(DataProtoFuture.concat([Ticket(part(1, 2))]).chunk(2)[1]))
    assert half.get().batch["x"].tolist() == [2]
    assert resolve([]) == []
