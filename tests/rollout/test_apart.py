"""A sampler in an event loop of its own: the same completions, and a process that answers while it computes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from tests.rollout.builders import prompt, requests, sample, tiny_model
from tests.rollout.test_updates_in_flight import hf, weights
from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.apart import ApartSampler, apart
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.service import SamplerService

STEP = 0.1
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


class Slow(HFSampler):
    """Its forward passes take their time."""

    def _step(self) -> None:
        time.sleep(STEP)
        super()._step()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "verl-sampler"]


def test_concurrent_requests_join_the_same_forward_passes_and_get_the_same_bits():
    wanted = requests([prompt(n, n) for n in (3, 9, 17)], samples=4, max_tokens=12)
    plain, other = HFSampler(tiny_model()), ApartSampler(HFSampler(tiny_model()))
    assert sample(other, wanted) == sample(plain, wanted)
    assert sample(other, wanted) == sample(plain, wanted), "from another event loop, too"
    assert other.stats() == plain.stats()
    assert threads()
    other.close()
    assert not threads()


def test_while_a_forward_pass_runs_calls_are_answered_and_new_weights_wait_for_its_end_alone():
    """A call over HTTP takes several turns of its loop; 20 of them are far less than one forward pass."""
    sampler = ApartSampler(Slow(tiny_model(seed=0), at_update="pause", owns_model=True))
    arrived: list[float] = []

    async def run():
        work = asyncio.ensure_future(sampler.generate(Request("a", (5, 6), LONG)))
        while sampler.stats()["response_tokens"] < 2:
            await asyncio.sleep(0.01)
        steps, chunks = sampler.stats()["steps"], list(weights(1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert await sampler.confirm(0) == 0 and sampler.stats()["steps"] - steps <= 4
        steps = sampler.stats()["steps"]
        await sampler.update_weights((arrived.append(sampler.stats()["steps"]) or one for one in chunks), 1)
        assert arrived[0] - steps <= 4 and not work.done()
        while sampler.stats()["steps"] < arrived[0] + 3:
            await asyncio.sleep(0.01)
        assert await sampler.abort() == 1
        return await work

    done = asyncio.run(asyncio.wait_for(run(), 30))
    assert done.finish_reason == "abort" and set(done.token_versions) == {0, 1}
    assert list(done.token_versions) == sorted(done.token_versions)


def test_an_abort_reaches_the_requests_of_the_same_turn_and_a_cancelled_one_frees_its_place():
    inner = HFSampler(tiny_model())
    sampler = ApartSampler(inner)

    async def run():
        tasks = [asyncio.ensure_future(sampler.generate(Request(name, (5, 6), LONG))) for name in "ab"]
        await asyncio.sleep(0)
        assert await sampler.abort(["a"]) == 1
        assert (await tasks[0]).finish_reason == "abort"
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        short = Request("b", (5, 6), SamplingParams(max_tokens=2, ignore_eos=True))
        return await sampler.generate(short)

    assert len(asyncio.run(asyncio.wait_for(run(), 30)).token_ids) == 2
    assert not inner._in_flight


def test_errors_reach_the_caller_and_a_sampler_that_is_dropped_leaves_no_thread():
    sampler = apart(HFSampler(tiny_model()))
    with pytest.raises(RolloutError, match="the prompt is empty"):
        asyncio.run(sampler.generate(Request("a", (), LONG)))
    asyncio.run(sampler.sleep())
    with pytest.raises(RolloutError, match="it sleeps"):
        asyncio.run(sampler.generate(Request("a", (5,), LONG)))
    del sampler
    gc.collect()
    assert not threads()
    service = SamplerService({"one": hf("wait")})
    assert apart(service) is service, "it computes nothing itself"
