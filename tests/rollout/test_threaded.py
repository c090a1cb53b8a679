"""A sampler in an event loop of its own: the same completions, and a process that answers while it computes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.harness.plugin import within
from tests.harness.samplers import prompt, reference_log_probs, requests, sample, tiny_model
from tests.rollout.test_updates_in_flight import hf, weights
from verl.errors import RolloutError, WorkerError
from verl.registry import TRANSPORTS
from verl.rollout import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.hosted import HostedSampler, WeightIntake
from verl.rollout.service import SamplerService
from verl.rollout.threaded import ThreadedSampler, threaded
from verl.single_controller.local.handle import LocalHandle

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


class Slow(HFSampler):
    """Its forward passes take their time."""

    def _step(self) -> None:
        time.sleep(0.005)
        super()._step()


class Gated(HFSampler):
    """Its forward passes run when they are let, and say which model's weights they saw."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.passes, self.begun, self.weights_seen = threading.Semaphore(0), 0, []
        self._marks = {tiny_model(seed=seed).lm_head.weight.sum().item(): str(seed) for seed in range(3)}

    def _step(self) -> None:
        self.begun += 1
        assert self.passes.acquire(timeout=30)
        self.weights_seen.append(self._marks.get(self.model.lm_head.weight.sum().item(), "mixed"))
        super()._step()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "verl-sampler"]


def test_concurrent_requests_join_the_same_forward_passes_and_get_the_same_bits():
    wanted = requests([prompt(n, n) for n in (3, 9, 17)], samples=4, max_tokens=12)
    plain, other = HFSampler(tiny_model()), ThreadedSampler(HFSampler(tiny_model()))
    assert sample(other, wanted) == sample(plain, wanted)
    assert sample(other, wanted) == sample(plain, wanted), "from another event loop, too"
    assert other.stats() == plain.stats()
    assert threads()
    other.close()
    assert not threads()


@within(30)
async def test_a_forward_pass_lets_calls_through_and_is_left_for_new_weights():
    """No other pass is begun with the old ones, and the pass that was left draws nothing."""
    inner = Gated(tiny_model(seed=0), at_update="pause", owns_model=True)
    sampler = ThreadedSampler(inner)

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.001)

    work = asyncio.ensure_future(sampler.generate(Request("a", (5, 6), LONG)))
    inner.passes.release(2)
    await until(lambda: inner.begun == 3)
    assert await sampler.confirm(0) == 0
    update = asyncio.ensure_future(sampler.update_weights(weights(1), 1))
    await asyncio.sleep(0)  # by then the update is announced and behind the pass in work
    assert sampler.version == 0 and not update.done()
    assert all(map(torch.equal, inner.model.state_dict().values(), tiny_model(seed=0).state_dict().values()))
    inner.passes.release()
    await update
    assert inner.weights_seen == ["0"] * 3
    inner.passes.release(LONG.max_tokens)
    await until(lambda: inner.begun > 5)
    assert await sampler.abort() == 1
    done = await work
    assert done.finish_reason == "abort" and done.token_versions[:3] == (0, 0, 1)
    assert inner.weights_seen[3:] == ["1"] * (len(inner.weights_seen) - 3), "a pass saw new weights alone"
    sampler.close()


@within(30)
async def test_updates_that_meet_every_pass_leave_each_version_its_tokens():
    """The pass after an update computes the prompt and draws a token: it is not left for the next update."""
    inner = Gated(tiny_model(seed=0), at_update="pause", owns_model=True)
    sampler = ThreadedSampler(inner)

    work = asyncio.ensure_future(sampler.generate(Request("a", (5, 6), LONG)))
    for version in (1, 2):
        while inner.begun < version:
            await asyncio.sleep(0.001)
        update = asyncio.ensure_future(sampler.update_weights(weights(version), version))
        await asyncio.sleep(0)  # by then the update is announced and behind the pass in work
        inner.passes.release()
        await update
    inner.passes.release(LONG.max_tokens)
    while inner.begun < 6:
        await asyncio.sleep(0.001)
    await sampler.abort()
    versions = (await work).token_versions
    assert versions[:3] == (0, 1, 2) and set(versions[2:]) == {2}, "one pass for each version that met one"
    sampler.close()


def test_a_pass_that_is_left_for_an_update_that_never_comes_is_computed_again_with_the_same_bits():
    wanted = requests([prompt(5, 5), prompt(11, 11)], samples=2, max_tokens=12)
    left: list[bool] = []

    class Announced(HFSampler):
        """Every third time that a layer may ask, an update is said to come."""

        def _step(self) -> None:
            self.interrupt_pass()
            super()._step()

    plain, announced = HFSampler(tiny_model()), Announced(tiny_model())
    ask = announced._interrupt.is_due
    announced._runner.is_interrupted = lambda: bool(left.append(ask()) or (left[-1] and len(left) % 3 == 0))
    assert sample(announced, wanted) == sample(plain, wanted)
    assert any(left) and announced.stats()["response_tokens"] == plain.stats()["response_tokens"]


@within(30)
async def test_an_update_that_is_cancelled_while_the_pass_runs_changes_nothing_and_the_next_one_works():
    inner = Gated(tiny_model(seed=0), at_update="pause", owns_model=True)
    sampler = ThreadedSampler(inner)

    work = asyncio.ensure_future(sampler.generate(Request("a", (5, 6), LONG)))
    inner.passes.release()
    while inner.begun < 2:
        await asyncio.sleep(0.001)
    update = asyncio.ensure_future(sampler.update_weights(weights(1), 1))
    await asyncio.sleep(0)  # by then the update is announced and behind the pass in work
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    inner.passes.release(LONG.max_tokens)
    await sampler.update_weights(weights(2), 2)
    await sampler.abort()
    assert set((await work).token_versions) <= {0, 2} and sampler.version == 2
    sampler.close()


@pytest.mark.parametrize("kind", ["shared_memory", "gloo", "disk", "delta"])
def test_weights_that_come_by_any_transport_beside_forward_passes_draw_the_tokens_of_their_version(kind):
    """Teacher-forced by the model of its version, each token has the log-prob that the sampler reported."""
    sampler = ThreadedSampler(Slow(tiny_model(seed=0), at_update="pause", owns_model=True))
    host = LocalHandle(WeightIntake(sampler))
    replica = HostedSampler(host, kind, partial(TRANSPORTS.get(kind).begin, 1 << 20, "cpu"))
    wanted = Request("a", (5, 6, 7), LONG)

    async def run():
        await replica.update_weights(weights(1), 1)
        work = asyncio.ensure_future(replica.generate(wanted))
        for version in (2, 3, None):
            drawn = sampler.stats()["response_tokens"]
            while sampler.stats()["response_tokens"] < drawn + 3:
                await asyncio.sleep(0.001)
            if version is not None:
                await replica.update_weights(weights(version), version)
        await replica.abort()
        return await work

    try:
        done = asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        replica.forget_transport()
        sampler.close()
    assert set(done.token_versions) == {1, 2, 3} and list(done.token_versions) == sorted(done.token_versions)
    for version in (1, 2, 3):
        logs = reference_log_probs(tiny_model(seed=version), wanted, done)
        drawn = torch.tensor(done.token_versions) == version
        expected = logs.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert (expected[drawn] - torch.tensor(done.log_probs)[drawn]).abs().max() < 4e-5


class Dying(ThreadedSampler):
    """Answers nothing more once it is killed, as a process does."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.killed, self.prefixes = asyncio.Event(), []

    async def generate(self, request):
        self.prefixes.append(request.generated_prefix)
        work = asyncio.ensure_future(super().generate(request))
        end = asyncio.ensure_future(self.killed.wait())
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if not work.done():
            work.cancel()
            raise WorkerError("killed")
        return work.result()


def test_a_request_whose_replica_is_killed_goes_on_elsewhere_from_what_it_had_reported():
    """The same tokens as without the loss, by the same numbers; those of before the last report are not drawn again."""
    wanted = requests([prompt(5, 5)], samples=2, max_tokens=60, ignore_eos=True)
    plain = sample(HFSampler(tiny_model(seed=0)), wanted)
    replicas = [Dying(Slow(tiny_model(seed=0))) for _ in range(2)]
    service = SamplerService({str(n): one for n, one in enumerate(replicas)}, is_elastic=True, report_seconds=0.02)

    async def run():
        work = [asyncio.ensure_future(service.generate(one)) for one in wanted]
        while not any(one.reported > 8 for one in service.replicas):
            await asyncio.sleep(0.005)
        victim = next(one for one in service.replicas if one.reported > 8)
        victim.sampler.killed.set()
        return victim.sampler, await asyncio.gather(*work)

    dead, done = asyncio.run(asyncio.wait_for(run(), 60))
    other = next(one for one in replicas if one is not dead)
    moved = asyncio.run(service.look()).moved
    kept = {prefix for prefix in other.prefixes if prefix}
    assert max(map(len, kept)) > 4 and {one[2] for one in moved} == set(map(len, kept))
    assert kept <= {one.token_ids[: len(prefix)] for one in plain for prefix in kept}
    for undisturbed, answer in zip(plain, done):
        assert answer.token_ids == undisturbed.token_ids and answer.finish_reason == "length"
        assert answer.log_probs == pytest.approx(undisturbed.log_probs, abs=2e-5)
    assert other.stats()["response_tokens"] == sum(60 - len(tokens) for tokens in kept) + 60 * (2 - len(kept))
    for one in replicas:
        one.close()


@within(60)
async def test_what_is_reported_keeps_the_version_that_drew_each_token_and_is_nothing_beside_recorded_experts():
    """So the bound on staleness, which holds every token's version, holds the oldest one of a prefix that is kept."""
    inner = HFSampler(tiny_model(seed=0), at_update="pause", owns_model=True)
    long = replace(LONG, max_tokens=100)

    work = asyncio.ensure_future(inner.generate(Request("a", (5, 6), long, generated_prefix=(7,), uid="a")))
    while inner.stats()["response_tokens"] < 10:
        await asyncio.sleep(0)
    await inner.update_weights(weights(1), 1)
    while inner.stats()["response_tokens"] < 20:
        await asyncio.sleep(0)
    some = await inner.drawn({"a": 1, "gone": 0})
    rest, none = await inner.drawn({"a": 4}), await inner.drawn({"a": 90})
    inner._runner.recorder, kept = object(), inner._runner.recorder
    beside_experts = await inner.drawn({"a": 1})
    inner._runner.recorder = kept
    done = await work
    count = len(some["a"].token_ids)
    assert some.keys() == {"a"} and none == beside_experts == {} and 20 <= count < 99
    for name in ("token_ids", "log_probs", "token_versions"):
        assert getattr(some["a"], name) == getattr(done, name)[:count]
        assert getattr(rest["a"], name) == getattr(done, name)[3:count]
    assert set(some["a"].token_versions[:10]) == {0} and some["a"].token_versions[-1] == 1


@within(30)
async def test_an_abort_reaches_the_requests_of_the_same_turn_and_a_cancelled_one_frees_its_place():
    inner = HFSampler(tiny_model())
    sampler = ThreadedSampler(inner)

    tasks = [asyncio.ensure_future(sampler.generate(Request(name, (5, 6), LONG))) for name in "ab"]
    await asyncio.sleep(0)
    assert await sampler.abort(["a"]) == 1
    assert (await tasks[0]).finish_reason == "abort"
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    never = asyncio.ensure_future(sampler.generate(Request("b", (5, 6), LONG)))
    await asyncio.sleep(0)
    never.cancel()  # before it was sent to the other loop
    with pytest.raises(asyncio.CancelledError):
        await never
    short = Request("b", (5, 6), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len((await sampler.generate(short)).token_ids) == 2
    assert not inner._in_flight


def test_errors_reach_the_caller_and_a_sampler_that_is_dropped_leaves_no_thread():
    sampler = threaded(HFSampler(tiny_model()))
    with pytest.raises(RolloutError, match="the prompt is empty"):
        asyncio.run(sampler.generate(Request("a", (), LONG)))
    asyncio.run(sampler.sleep())
    with pytest.raises(RolloutError, match="it sleeps"):
        asyncio.run(sampler.generate(Request("a", (5,), LONG)))
    del sampler
    end = time.monotonic() + 30
    while threads() and time.monotonic() < end:  # its thread may still be at the end of the last call
        gc.collect()
        time.sleep(0.01)
    assert not threads()
    service = SamplerService({"one": hf("wait")})
    assert threaded(service) is service, "it computes nothing itself"
