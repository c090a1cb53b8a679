"""Who gets a request, and what happens to it when its replica is lost."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.harness.plugin import within
from verl.errors import RolloutError, WorkerError
from verl.metrics import notices
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.base import Sampler
from verl.rollout.lost import EngineLostError
from verl.rollout.service import FAILURES, SLACK, Replica, Router, SamplerService
from verl.weight_sync import chunk_weights

ASKED = Request("a", (1,), SamplingParams(max_tokens=2), uid="row")


class Fake(Sampler):
    """A replica that answers with its name as the only token, fails on demand, or keeps silent."""

    version = 0

    def __init__(self, number):
        self.number, self.log = number, []
        self.error: Exception | None = None
        self.silent = False

    async def _did(self, method, *args):
        self.log.append((method, args))
        if self.silent:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    async def generate(self, request):
        await self._did("generate", request)
        return Completion(request.id, (self.number,), (-0.1,), "stop", (self.version,))

    async def update_weights(self, chunks, version):
        await self._did("update_weights", version)
        assert [chunk.version for chunk in chunks] == [version]
        self.version = version

    async def abort(self, request_ids=None):
        await self._did("abort", request_ids)
        return len(request_ids)

    async def sleep(self, level=1):
        await self._did("sleep")

    async def wake(self):
        await self._did("wake")

    def stats(self):
        return {"steps": float(len(self.log))}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(count, **options):
    fakes = [Fake(number) for number in range(count)]
    return fakes, SamplerService({f"replica {fake.number}": fake for fake in fakes}, **options)


def many(replicas, requests):
    async def run():
        return await asyncio.wait_for(asyncio.gather(*(replicas.generate(r) for r in requests)), 20)

    return asyncio.run(run())


def asked(number, uid="", session=""):
    return Request(str(number), (1,), ASKED.sampling, uid=uid, sample_index=number, session=session)


def chunks(version):
    return chunk_weights([("w", torch.ones(2))], 64, version)


def test_requests_that_belong_to_nothing_are_spread_evenly():
    fakes, replicas = make(3)
    many(replicas, [asked(i) for i in range(12)])
    assert [len(fake.log) for fake in fakes] == [4, 4, 4]


async def test_the_turns_of_a_conversation_meet_their_cache():
    _, replicas = make(3)

    talks = {}
    for turn in range(4):
        done = await asyncio.gather(*(replicas.generate(asked(t, f"u{t}/{turn}", f"talk {t}")) for t in range(9)))
        for talk, completion in enumerate(done):
            talks.setdefault(talk, set()).add(completion.token_ids)
    assert all(len(places) == 1 for places in talks.values())


def test_the_samples_of_a_prompt_share_a_replica_unless_it_is_far_ahead():
    replicas = [Replica(str(i), Fake(i)) for i in range(3)]
    router = Router()
    for number in range(2 * SLACK + 2):
        router.choose(ASKED, replicas).ids.add(str(number))
    loads = sorted(replica.load for replica in replicas)
    assert sum(loads) == 2 * SLACK + 2 and loads[2] == SLACK + 1 and loads[2] - loads[0] <= SLACK + 1


def test_what_a_lost_replica_had_goes_to_another_and_it_gets_nothing_more():
    fakes, replicas = make(3)
    fakes[1].error = WorkerError("a worker is gone")
    done = many(replicas, [asked(i) for i in range(12)])
    assert sorted(completion.request_id for completion in done) == sorted(str(i) for i in range(12))
    assert {completion.token_ids for completion in done} == {(0,), (2,)}
    before = len(fakes[1].log)
    many(replicas, [asked(i) for i in range(12)])
    assert len(fakes[1].log) == before
    stats = replicas.stats()
    assert (stats["resent"], stats["replicas_lost"], stats["replicas_alive"]) == (before, 1, 2)
    assert any("replica 1" in key for key in notices())


def test_a_conversation_goes_on_elsewhere_when_its_replica_is_lost():
    fakes, replicas = make(2)
    (first,) = many(replicas, [asked(0, session="talk")])
    fakes[first.token_ids[0]].error = WorkerError("gone")
    later = [many(replicas, [asked(i, session="talk")])[0].token_ids for i in range(3)]
    assert later == [(1 - first.token_ids[0],)] * 3


def test_a_replica_is_not_given_up_for_one_bad_answer():
    fakes, replicas = make(2)
    fakes[0].error = EngineLostError("nonsense")
    many(replicas, [asked(0)])
    many(replicas, [asked(1)])
    assert replicas.stats()["replicas_alive"] == 2 and FAILURES == 2
    many(replicas, [asked(2), asked(3)])
    assert replicas.stats()["replicas_alive"] == 1


def test_a_mistake_of_the_request_is_not_sent_around():
    fakes, replicas = make(3)
    for fake in fakes:
        fake.error = RolloutError("the prompt is empty", key="token_ids")
    with pytest.raises(RolloutError, match="the prompt is empty"):
        many(replicas, [ASKED])
    assert sum(len(fake.log) for fake in fakes) == 1 and replicas.stats()["replicas_alive"] == 3


def test_a_request_that_kills_every_engine_it_meets_ends_before_all_are_dead():
    fakes, replicas = make(6, max_resends=2)
    for fake in fakes:
        fake.error = WorkerError("killed")
    with pytest.raises(EngineLostError, match="was lost by 3 replicas in turn"):
        many(replicas, [ASKED])
    assert replicas.stats()["replicas_alive"] == 3


def test_with_no_replica_left_the_error_says_why():
    fakes, replicas = make(2)
    for fake in fakes:
        fake.error = WorkerError("out of memory")
    with pytest.raises(EngineLostError, match=r"no replica is left of 2: replica 0: .*out of memory"):
        many(replicas, [ASKED])


def test_before_any_update_a_lost_replica_is_tried_again_after_a_while():
    clock = Clock()
    fakes, replicas = make(2, retry_seconds=5.0, clock=clock)
    fakes[0].error = WorkerError("gone")
    many(replicas, [asked(i) for i in range(4)])
    fakes[0].error = None
    assert replicas.stats()["replicas_alive"] == 1
    clock.now = 6.0
    many(replicas, [asked(i) for i in range(4)])
    many(replicas, [asked(i) for i in range(4)])
    assert replicas.stats()["replicas_alive"] == 2


def test_after_an_update_a_lost_replica_comes_back_only_with_the_next_weights():
    """It may have been started anew with the weights of the folder: nobody may sample from those."""
    clock = Clock()
    fakes, replicas = make(2, clock=clock)
    asyncio.run(replicas.update_weights(chunks(1), 1))
    fakes[0].error = WorkerError("gone")
    many(replicas, [asked(i) for i in range(4)])
    fakes[0].error, clock.now = None, 100.0
    assert {done.token_ids for done in many(replicas, [asked(i) for i in range(6)])} == {(1,)}
    asyncio.run(replicas.update_weights(chunks(2), 2))
    done = many(replicas, [asked(i) for i in range(6)])
    assert {d.token_ids for d in done} == {(0,), (1,)} and {d.token_versions for d in done} == {(2,)}


def test_a_replica_that_does_not_take_the_weights_is_left_out_and_none_mixes_versions():
    fakes, replicas = make(3)
    fakes[2].error = EngineLostError("gone")
    asyncio.run(replicas.update_weights(chunks(4), 4))
    fakes[2].error = None
    assert {done.token_versions for done in many(replicas, [asked(i) for i in range(9)])} == {(4,)}
    assert len([entry for entry in fakes[2].log if entry[0] == "generate"]) == 0


def test_an_update_that_no_replica_takes_is_an_error():
    fakes, replicas = make(2)
    for fake in fakes:
        fake.error = RolloutError("another shape")
    with pytest.raises(RolloutError, match="another shape"):
        asyncio.run(replicas.update_weights(chunks(4), 4))


def test_an_abort_reaches_the_replicas_that_hold_the_requests():
    fakes, replicas = make(2)
    for fake in fakes:
        fake.silent = True

    async def run():
        tasks = [asyncio.ensure_future(replicas.generate(asked(i))) for i in range(4)]
        while sum(len(fake.log) for fake in fakes) < 4:
            await asyncio.sleep(0)
        for fake in fakes:
            fake.silent = False
        counts = await replicas.abort(["0", "1", "unknown"]), await replicas.abort()
        for task in tasks:
            task.cancel()
        return counts

    assert asyncio.run(run()) == (2, 4)
    assert all(len([entry for entry in fake.log if entry[0] == "abort"]) == 2 for fake in fakes)


async def test_sleep_and_wake_reach_all_and_a_dead_one_is_noted():
    fakes, replicas = make(3)
    fakes[0].error = WorkerError("gone")

    await replicas.sleep(1)
    await replicas.wake()
    assert [entry[0] for entry in fakes[1].log] == ["sleep", "wake"] and replicas.stats()["replicas_alive"] == 2


async def test_a_replica_that_joins_takes_its_share():
    fakes, service = make(2)
    late = Fake(2)

    fakes[0].silent = True
    begun = [asyncio.ensure_future(service.generate(asked(i))) for i in range(4)]
    while sum(len(fake.log) for fake in fakes) < 4:
        await asyncio.sleep(0)
    await service.add("replica 2", late)
    for i in range(6):
        await service.generate(asked(10 + i))
    assert len(fakes[0].log) == 2 and len(fakes[1].log) + len(late.log) == 8, "the silent one is ahead of them"
    assert late.log and service.replica_stats()["replica 2"]["completed"] == len(late.log)
    for task in begun:
        task.cancel()


def test_names_of_replicas_are_unique():
    _, service = make(1)
    with pytest.raises(RolloutError, match="there is a replica of this name"):
        asyncio.run(service.add("replica 0", Fake(1)))


def test_a_version_is_published_to_those_that_have_it_and_the_others_wait_for_the_next():
    fakes, service = make(3)
    fakes[0].version = fakes[1].version = 5
    asyncio.run(service.publish(5, {"replica 1": EngineLostError("its transfer broke")}))
    assert {done.token_ids for done in many(service, [asked(i) for i in range(9)])} == {(0,)}
    for fake in fakes:
        fake.version = 6
    asyncio.run(service.publish(6))
    assert {done.token_ids for done in many(service, [asked(i) for i in range(9)])} == {(0,), (1,), (2,)}
    with pytest.raises(RolloutError, match="it has other weights"):
        asyncio.run(service.publish(7))


def test_a_replica_that_joins_with_other_weights_waits_for_the_next():
    fakes, service = make(1)
    fakes[0].version = 2
    asyncio.run(service.publish(2))
    late = Fake(1)
    asyncio.run(service.add("late", late))
    assert {done.token_ids for done in many(service, [asked(i) for i in range(6)])} == {(0,)}
    asyncio.run(service.update_weights(chunks(3), 3))
    assert {done.token_ids for done in many(service, [asked(i) for i in range(6)])} == {(0,), (1,)}


def test_a_replica_that_joins_while_a_version_is_published_waits_for_the_next():
    fakes, service = make(2)
    fakes[0].version = fakes[1].version = 2
    asyncio.run(service.publish(2))
    late = Fake(2)
    late.version = 2
    fakes[0].version = fakes[1].version = 3

    async def run():
        publishing = asyncio.ensure_future(service.publish(3))
        await asyncio.sleep(0)
        await service.add("late", late)
        await publishing

    asyncio.run(run())
    assert {done.token_ids for done in many(service, [asked(i) for i in range(6)])} == {(0,), (1,)}
    late.version = 3
    asyncio.run(service.publish(3))
    assert {done.token_ids for done in many(service, [asked(i) for i in range(6)])} == {(0,), (1,), (2,)}


async def test_an_update_waits_for_what_is_being_sampled_and_nothing_mixes_versions():
    _, service = make(2)

    before = [asyncio.ensure_future(service.generate(asked(i))) for i in range(4)]
    await asyncio.sleep(0)
    update = asyncio.ensure_future(service.update_weights(chunks(1), 1))
    await asyncio.sleep(0)
    after = [asyncio.ensure_future(service.generate(asked(10 + i))) for i in range(4)]
    await update
    versions = [(await asyncio.gather(*tasks)) for tasks in (before, after)]
    assert [{done.token_versions for done in answers} for answers in versions] == [{(0,)}, {(1,)}]


@within(20)
async def test_requests_without_a_slot_wait_for_whichever_replica_has_one_first():
    """Replica 0 keeps its two requests; the other ten go through the slots of replica 1."""
    fakes, service = make(2, slots=2)

    fakes[0].silent = True
    tasks = [asyncio.ensure_future(service.generate(asked(i))) for i in range(12)]
    while sum(task.done() for task in tasks) < 10:
        await asyncio.sleep(0)
    loads = [replica.load for replica in service.replicas]
    for task in tasks:
        task.cancel()
    assert (loads, [len(fake.log) for fake in fakes]) == ([2, 0], [2, 10])


@within(20)
async def test_those_that_wait_hear_that_no_replica_is_left():
    fakes, service = make(2, slots=1)
    for fake in fakes:
        fake.error = WorkerError("gone")

    errors = await asyncio.gather(*(service.generate(asked(i)) for i in range(6)), return_exceptions=True)
    assert all(isinstance(error, EngineLostError) for error in errors)


async def test_a_lost_replica_frees_its_memory_too_and_one_that_is_silent_is_not_waited_for():
    (first, second, third), service = make(3, lost_seconds=0.05)
    second.version = 7  # it never got version 1
    third.silent = True
    service.replicas[2].lost_at = 0.0

    first.version = 1
    third.log.clear()
    failed = {"replica 2": RolloutError("its process hangs")}
    await service.publish(1, failed)
    await asyncio.wait_for(service.sleep(), 5)
    await service.wake()
    assert [replica.is_lost for replica in service.replicas] == [False, True, True]
    assert [[method for method, _ in fake.log] for fake in (first, second, third)] == [
        ["sleep", "wake"], ["sleep"], ["sleep"]
    ]  # fmt: skip


async def test_before_any_update_a_lost_replica_wakes_with_the_others_because_it_is_tried_again():
    clock = Clock()
    fakes, service = make(2, clock=clock, retry_seconds=5.0)

    fakes[0].error = WorkerError("gone")
    await asyncio.gather(*(service.generate(asked(i)) for i in range(2)))
    fakes[0].error = None
    await service.sleep()
    await service.wake()
    assert [replica.is_lost for replica in service.replicas] == [True, False]
    assert [[method for method, _ in fake.log][-2:] for fake in fakes] == [["sleep", "wake"]] * 2


def test_an_abort_ends_what_waits_for_a_slot_and_no_replica_begins_it():
    fakes, service = make(2, slots=1)
    for fake in fakes:
        fake.silent = True

    async def run():
        tasks = [asyncio.ensure_future(service.generate(asked(i))) for i in range(5)]
        while sum(len(fake.log) for fake in fakes) < 2:
            await asyncio.sleep(0)
        for fake in fakes:
            fake.silent = False
        counts = await service.abort(["3", "unknown"]), await service.abort()
        ended = await asyncio.gather(*tasks[2:])
        for task in tasks[:2]:
            task.cancel()
        return counts, ended

    counts, ended = asyncio.run(asyncio.wait_for(run(), 20))
    assert counts == (1, 4), "of the last four two wait"
    assert [(done.request_id, done.finish_reason, done.token_ids) for done in ended] == [
        (i, "abort", ()) for i in "234"
    ]
    assert sum(entry[0] == "generate" for fake in fakes for entry in fake.log) == 2


@within(20)
async def test_an_abort_ends_what_waits_at_the_gate_of_an_update_and_no_replica_begins_it():
    fakes, service = make(2)

    update = asyncio.ensure_future(service.update_weights(chunks(1), 1))
    await asyncio.sleep(0)
    tasks = [asyncio.ensure_future(service.generate(asked(i))) for i in range(3)]
    await asyncio.sleep(0)
    counts = await service.abort(["1", "unknown"]), await service.abort(["2"])
    await update
    ended = await asyncio.gather(*tasks)
    assert counts == (1, 1)
    assert [done.finish_reason for done in ended] == ["stop", "abort", "abort"]
    assert [entry[1][0].id for fake in fakes for entry in fake.log if entry[0] == "generate"] == ["0"]


@within(5)
async def test_a_slot_that_the_next_request_may_not_take_goes_to_another_one():
    """Replica 1 is busy for good; replica 0 fails once on a sample of that prompt, which then waits for replica 1."""
    clock = Clock()
    fakes, service = make(2, slots=1, clock=clock)

    fakes[1].silent = True
    tasks = [asyncio.ensure_future(service.generate(asked(0, uid="long")))]
    await asyncio.sleep(0)
    fakes[0].error = EngineLostError("a bad answer")
    tasks += [asyncio.ensure_future(service.generate(asked(1, uid="long")))]
    tasks += [asyncio.ensure_future(service.generate(asked(i, uid="short"))) for i in range(2, 6)]
    await asyncio.sleep(0)
    clock.now += 9.0  # so the other sample of its prompt is expected to take longest, and is called first
    while not service.stats()["resent"]:
        await asyncio.sleep(0)
    fakes[0].error = None
    await asyncio.gather(*tasks[2:])
    for task in tasks[:2]:
        task.cancel()
    assert [replica.load for replica in service.replicas] == [0, 1]


def elastic(count):
    fakes = [Fake(number) for number in range(count)]
    return fakes, SamplerService({str(fake.number): fake for fake in fakes}, is_elastic=True)


@within(5)
async def test_where_replicas_are_replaced_requests_wait_for_one_that_joins_and_go_there():
    (first,), service = elastic(1)

    first.error = WorkerError("killed")
    tasks = [asyncio.ensure_future(service.generate(asked(number, uid="row"))) for number in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    assert await service.abort(["2"]) == 1, "one that waits can be ended"
    await service.discard("0")
    await service.add("1", Fake(1))
    assert [done.token_ids for done in await asyncio.gather(*tasks)] == [(1,), (1,), ()]
    assert (await service.look()).moved == (("row", 0, 0), ("row", 1, 0), ("row", 2, 0))
    assert (await service.look()).moved == ()


def test_an_update_that_finds_every_replica_dead_counts_for_those_that_replace_them():
    fakes, service = elastic(2)

    async def run():
        for fake in fakes:
            fake.error = WorkerError("killed")
        await service.publish(1, {str(fake.number): fake.error for fake in fakes})
        behind, has_it = Fake(2), Fake(3)
        has_it.version = 1
        await service.add("2", behind)
        await service.add("3", has_it)
        return await service.generate(asked(0))

    assert asyncio.run(asyncio.wait_for(run(), 5)).token_ids == (3,) and service.version == 1
    with pytest.raises(RolloutError, match="no room"):
        asyncio.run(service.publish(2, {name: RolloutError("no room") for name in ("0", "1", "2", "3")}))


@within(5)
async def test_once_no_replica_comes_any_more_every_request_hears_the_last_error():
    (only,), service = elastic(1)

    only.error = WorkerError("killed")
    tasks = [asyncio.ensure_future(service.generate(asked(number))) for number in range(5)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    await service.give_up("2 of 2 replacements were made. Its last error: out of memory")
    tasks.append(asyncio.ensure_future(service.generate(asked(9))))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(errors) == 6 and all(isinstance(error, EngineLostError) for error in errors)
    assert {str(error) for error in errors} == {"2 of 2 replacements were made. Its last error: out of memory"}
