"""What one rank of the actor sends: every replica once, and the whole export whatever becomes of a replica."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace

import pytest
import torch

from verl.config import HFModelConfig, RolloutConfig
from verl.errors import RolloutError, portable
from verl.workers.model import ModelRole, ModelWorker
from verl.workers.part import ModelPart, PassLimits
from verl.workers.sending import FeedChange, SyncResult, WeightSender

COUNT = 5


class Exporting:
    """An engine of which only the export is there; other ranks would wait for each of its tensors."""

    def __init__(self):
        self.made = 0

    def export_weights(self):
        for number in range(COUNT):
            self.made += 1
            yield f"w{number}", torch.full((300_000,), float(number))


class Taking:
    """A replica that takes weights, or refuses them after some buckets."""

    def __init__(self, refuses_after=None):
        self.taken, self.refuses_after = [], refuses_after

    async def update_weights(self, chunks, version):
        for number, chunk in enumerate(chunks):
            if number == self.refuses_after:
                raise RolloutError("no room")
            self.taken += [(version, name) for name, _ in chunk.tensors]

    def stats(self):
        return {}


def sent_to(**replicas):
    engine, plain = Exporting(), RolloutConfig()
    small = replace(plain.checkpoint_engine, update_weights_bucket_megabytes=1)
    return engine, WeightSender(replace(plain, checkpoint_engine=small), HFModelConfig(path="nowhere"), replicas).send(
        engine, 3
    )


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_export_is_made_once_whatever_the_number_of_replicas(number):
    replicas = {f"r{i}": Taking() for i in range(number)}
    engine, sent = sent_to(**replicas)
    assert engine.made == COUNT and not sent.failed
    assert sent.num_bytes == (COUNT * 300_000 * 4 if number else 0)
    assert all(replica.taken == [(3, f"w{i}") for i in range(COUNT)] for replica in replicas.values())


@pytest.mark.parametrize("others", [0, 1])
def test_the_export_goes_on_where_a_replica_stops_because_other_ranks_take_part_in_it(others):
    replicas = {"bad": Taking(refuses_after=1), **{f"good{i}": Taking() for i in range(others)}}
    engine, sent = sent_to(**replicas)
    assert engine.made == COUNT and list(sent.failed) == ["bad"] and "no room" in str(sent.failed["bad"])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_export_that_fails_is_no_fault_of_the_replicas(number):
    class Failing(Exporting):
        def export_weights(self):
            yield from list(super().export_weights())[:2]
            raise KeyError("a weight is missing")

    replicas = {f"r{i}": Taking() for i in range(number)}
    with pytest.raises(KeyError, match="a weight is missing"):
        WeightSender(RolloutConfig(), HFModelConfig(path="nowhere"), replicas).send(Failing(), 3)


def test_what_a_replica_raised_can_go_to_another_process():
    class Refusing(Taking):
        async def update_weights(self, chunks, version):
            raise type("Odd", (Exception,), {})("not to be copied")

    _, sent = sent_to(odd=Refusing())
    assert str(pickle.loads(pickle.dumps(sent)).failed["odd"]) == "Odd: not to be copied"


def test_what_all_ranks_sent_is_put_together():
    lost = RolloutError("gone")
    together = SyncResult.by_all([SyncResult(10.0, {"a": lost}), SyncResult(0.0), SyncResult(30.0)])
    assert together == SyncResult(30.0, {"a": lost})


@pytest.mark.parametrize("call", [("get_weights",), ("set_weights", {}), ("to", "cpu"), ("to", "cuda")])
def test_nobody_touches_a_model_whose_weights_are_on_their_way(call):
    seen, may_end = [], threading.Event()

    class Noting:
        """An engine that notes what it is asked for."""

        def __getattr__(self, name):
            return lambda *_: seen.append(name) or {}

    worker = ModelWorker(ModelRole("m", HFModelConfig(path="nowhere"), "k", "plain", None, None, PassLimits))
    worker.part = ModelPart(Noting())
    worker.sending.begin(lambda: may_end.wait(20) and seen.append("sent"))
    threading.Timer(0.2, may_end.set).start()
    getattr(worker, call[0])(*call[1:])
    assert len(seen) == 2 and seen[0] == "sent"


class WithParameters(RolloutError):
    """A user's error, which a copy cannot make again from its message alone."""

    def __init__(self, reason: str, *, url: str):
        super().__init__(f"{reason} at {url}")


def test_an_error_of_ours_goes_to_another_process_as_it_is_and_a_users_subclass_in_words():
    ours = RolloutError("no room")
    assert portable(ours) is ours
    theirs = portable(WithParameters("refused", url="http://x"))
    assert type(pickle.loads(pickle.dumps(theirs))) is RolloutError
    assert "WithParameters: refused at http://x" in str(theirs)


def test_a_replica_that_joins_gets_what_was_sent_last_and_from_then_on_what_the_others_get():
    """The engine is not asked for it: its weights are on their way to the next version by then."""
    first, late, wrong = Taking(), Taking(), Taking(refuses_after=1)
    engine, plain = Exporting(), RolloutConfig()
    small = replace(plain, checkpoint_engine=replace(plain.checkpoint_engine, update_weights_bucket_megabytes=1))
    sender = WeightSender(small, HFModelConfig(path="nowhere"), {"first": first}, keeps=True)
    join = FeedChange((), {"late": late}, {"late": late, "wrong": wrong})
    assert sender.change(FeedChange(join={"first": first}, catch_up={"late": late})) == SyncResult() and not late.taken
    sender.send(engine, 3)
    failed = sender.change(join).failed
    assert late.taken == first.taken and engine.made == COUNT and list(failed) == ["wrong"]
    sender.change(FeedChange(leave=("first", "unknown")))
    sender.send(engine, 4)
    assert [version for version, _ in late.taken] == [3] * COUNT + [4] * COUNT and len(first.taken) == COUNT


def test_what_is_kept_for_replicas_that_join_is_a_copy():
    class Training(Exporting):
        weight = torch.zeros(4)

        def export_weights(self):
            yield "w", self.weight

    class Holding(Taking):
        async def update_weights(self, chunks, version):
            self.taken += [tensor.clone() for chunk in chunks for _, tensor in chunk.tensors]

    engine, late = Training(), Holding()
    sender = WeightSender(RolloutConfig(), HFModelConfig(path="nowhere"), {}, keeps=True)
    sender.send(engine, 1)
    engine.weight += 1
    sender.change(FeedChange(catch_up={"late": late}))
    assert late.taken[0].tolist() == [0.0] * 4
