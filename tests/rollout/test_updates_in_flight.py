"""New weights while requests run: what is kept, which weights drew which token, and that every response ends."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

from tests.harness.plugin import within
from tests.harness.samplers import prompt, reference_log_probs, requests, sample, tiny_model
from tests.rollout.test_gated import Scripted
from verl.errors import WorkerError
from verl.registry import TRANSPORTS
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.base import Sampler
from verl.rollout.gated import Sampled
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.hosted import HostedSampler, RemoteSampler, WeightIntake
from verl.rollout.resume import continued, join_attempts
from verl.rollout.service import SamplerService
from verl.single_controller.local.handle import LocalHandle
from verl.weight_sync import chunk_weights

WANTED = requests([prompt(n, n) for n in (3, 9, 17)], samples=2, max_tokens=24, ignore_eos=True)


def weights(version: int, seed: int | None = None):
    """A stream of the weights that belong to a version: those of a model made with this seed."""
    made = tiny_model(seed=version if seed is None else seed)
    return chunk_weights(made.state_dict().items(), 1 << 20, version)


def hf(at_update: str, **options) -> HFSampler:
    return HFSampler(tiny_model(seed=0), at_update=at_update, owns_model=True, **options)


def as_sampler(at_update: str, **options) -> Sampler:
    """`abort` needs somebody who goes on."""
    sampler = hf(at_update, **options)
    return SamplerService({"one": sampler}) if at_update == "abort" else sampler


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def updated_while_sampling(sampler: Sampler, wanted, versions, between: int) -> list[Completion]:
    """The answers, with an update after so many turns of the event loop each."""

    async def run():
        tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
        for version in versions:
            await turns(between)
            await sampler.update_weights(weights(version), version)
        return await asyncio.gather(*tasks)

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("at_update", ["pause", "abort"])
def test_each_token_is_drawn_from_the_weights_of_its_version_alone(at_update):
    """Teacher-forced by the model of its version, a token has the log-prob that the sampler reported: no pass mixed
    weights, and none read a cache that older ones had filled."""
    found = updated_while_sampling(as_sampler(at_update), WANTED, [1, 2, 3], between=6)
    models = {version: tiny_model(seed=version) for version in range(4)}
    for request, done in zip(WANTED, found):
        assert len(done.token_ids) == len(done.log_probs) == len(done.token_versions) == 24
        assert done.finish_reason == "length" and not done.is_interrupted
        assert list(done.token_versions) == sorted(done.token_versions) and set(done.token_versions) >= {0, 1, 2}
        for version in set(done.token_versions):
            logs = reference_log_probs(models[version], request, done)
            expected = logs.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
            drawn = torch.tensor(done.token_versions) == version
            assert (expected[drawn] - torch.tensor(done.log_probs)[drawn]).abs().max() < 4e-5


def test_a_forward_pass_sees_one_version_only():
    """At each pass: the weights in the model, the version that is reported, and that under which each row began."""
    sampler = hf("pause")
    marks = {tiny_model(seed=version).lm_head.weight.sum().item(): version for version in range(3)}
    step, passes, born = sampler._runner.step, [], {}

    def watched(chunks):
        rows = [*sampler._runner.rows, *(row for chunk in chunks for row in chunk.prompt.rows)]
        current = marks[sampler.model.lm_head.weight.sum().item()]
        passes.append({current, sampler.version, *(born.setdefault(id(row), (row, current))[1] for row in rows)})
        return step(chunks)

    sampler._runner.step = watched
    updated_while_sampling(sampler, WANTED, [1, 2], between=5)
    assert all(len(versions) == 1 for versions in passes) and set().union(*passes) == {0, 1, 2}


@pytest.mark.parametrize("at_update", ["pause", "abort"])
def test_with_unchanged_weights_the_tokens_are_those_of_an_undisturbed_request_bit_for_bit(at_update):
    plain = sample(hf("wait", full_determinism=True), WANTED)
    sampler = as_sampler(at_update, full_determinism=True)

    async def run():
        tasks = [asyncio.ensure_future(sampler.generate(request)) for request in WANTED]
        for _ in range(3):
            await turns(5)
            await sampler.update_weights(weights(0), 0)
        return await asyncio.gather(*tasks)

    for undisturbed, done in zip(plain, asyncio.run(run())):
        assert done.token_ids == undisturbed.token_ids
        assert done.log_probs == pytest.approx(undisturbed.log_probs, abs=2e-5)


@pytest.mark.parametrize("at_update", ["pause", "abort"])
@within(60)
async def test_updates_without_a_pause_between_them_let_every_response_end(at_update):
    """Two slots, prompts in pieces of 4 tokens, and an update whenever the last one is done."""
    sampler = as_sampler(at_update, max_num_seqs=2, max_num_batched_tokens=4)
    wanted = requests([prompt(n, n) for n in (3, 9, 17)], max_tokens=5, ignore_eos=True)

    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
    version = 0
    await turns(1)
    while not all(task.done() for task in tasks):
        version += 1
        await sampler.update_weights(weights(version, seed=version % 4), version)
    count, found = version, await asyncio.gather(*tasks)
    assert [len(done.token_ids) for done in found] == [5, 5, 5]
    assert set().union(*(done.token_versions for done in found)) >= set(range(count)), "each version drew a token"


def test_weights_reach_a_replica_in_another_process_while_it_samples():
    """By a transport, beside the requests, as the trainer sends them to a pool of samplers; then they are published."""
    host = LocalHandle(WeightIntake(hf("abort")))
    replica = HostedSampler(host, "shared_memory", partial(TRANSPORTS.get("shared_memory").begin, 1 << 20, "cpu"))
    service = SamplerService({"a": RemoteSampler(host)})

    wanted = requests([prompt(n, n) for n in (3, 9)], max_tokens=200, ignore_eos=True)

    async def run():
        await replica.update_weights(weights(1), 1)  # makes the transport
        tasks = [asyncio.ensure_future(service.generate(request)) for request in wanted]
        await turns(8)
        await replica.update_weights(weights(2), 2)
        await service.publish(2)
        return await asyncio.gather(*tasks)

    try:
        found = asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        replica.forget_transport()
    assert all(len(done.token_ids) == 200 and set(done.token_versions) == {1, 2} for done in found)
    assert service.version == 2 and service.stats()["interrupted"] == len(wanted)


def test_waiting_for_running_requests_is_the_default():
    sampler = hf("wait")
    found = updated_while_sampling(sampler, WANTED, [1], between=5)
    assert {frozenset(done.token_versions) for done in found} == {frozenset({0})} and sampler.version == 1


class Slowly(Scripted):
    """Answers one token a turn of the event loop, and with what there is when it is aborted."""

    def __init__(self, at_update, gives_tokens=True):
        super().__init__()
        self.at_update, self.gives_tokens, self.prefixes = at_update, gives_tokens, []
        self.aborted: set[str] = set()

    async def _sample(self, request):
        self.prefixes.append(request.generated_prefix)
        made = []
        for position in range(len(request.generated_prefix), request.sampling.max_tokens):
            await asyncio.sleep(0)
            if request.id in self.aborted:
                self.aborted.discard(request.id)
                kept = tuple(made) if self.gives_tokens else ()
                return Sampled(kept, (-0.5,) * len(kept), "abort")
            made.append(position)
        return Sampled(tuple(made), (-0.5,) * len(made), "length")

    async def _abort(self, request_ids):
        self.aborted |= set(request_ids)
        return len(request_ids)


ASKED = Request("a", (1, 2), SamplingParams(max_tokens=9), uid="row")


def test_an_engine_elsewhere_gets_prompt_and_prefix_with_what_is_left_of_the_budget():
    sampler = Slowly("pause")
    (done,) = updated_while_sampling(sampler, [ASKED], [1, 2], between=4)
    assert done.token_ids == tuple(range(9)) and done.log_probs == (-0.5,) * 9 and done.finish_reason == "length"
    assert [len(prefix) for prefix in sampler.prefixes] == [
        0,
        done.token_versions.count(0),
        9 - done.token_versions.count(2),
    ]
    assert sampler.stats()["requests"] == 1 and sampler.stats()["response_tokens"] == 9


@within(10)
async def test_a_request_that_comes_back_while_weights_are_loaded_waits_for_their_end():
    """As one does that travelled: it was aborted by this very update."""

    class SlowToLoad(Slowly):
        async def _load(self, chunks, version):
            await turns(20)
            await super()._load(chunks, version)

    sampler = SlowToLoad("abort")
    first = asyncio.ensure_future(sampler.generate(ASKED))
    await turns(4)
    update = asyncio.ensure_future(sampler.update_weights(weights(1), 1))
    part = await first
    await turns(8)
    assert part.is_interrupted and not update.done()
    rest = await sampler.generate(continued(ASKED, part))
    done = join_attempts([part, rest])
    assert done.token_ids == tuple(range(9)) and set(done.token_versions) == {0, 1}


def test_a_server_that_gives_nothing_of_an_aborted_answer_is_waited_for_the_second_time():
    sampler = Slowly("pause", gives_tokens=False)
    (done,) = updated_while_sampling(sampler, [ASKED], [1, 2, 3], between=3)
    assert done.token_ids == tuple(range(9)) and set(done.token_versions) == {1}
    assert sampler.prefixes == [(), ()] and sampler.version == 3


@within(10)
async def test_who_gives_up_a_response_between_two_attempts_gets_what_there_is():
    sampler = Slowly("pause")
    task = asyncio.ensure_future(sampler.generate(ASKED))
    await turns(4)
    held = sampler._gate.shut(sampler._interrupt)
    async with held:
        await turns(3)
        assert await sampler.abort() == 1
    done = await task
    assert done.finish_reason == "abort" and 0 < len(done.token_ids) < 9 and not done.is_interrupted


def test_a_request_goes_on_elsewhere_from_its_prefix_when_the_replica_that_got_it_next_is_lost():
    """The first replica gives three tokens back at its update, the second one dies with the rest, the third ends it."""

    class Replica(Sampler):
        version = 0

        def __init__(self, name, act):
            self.name, self.act = name, act

        async def generate(self, request):
            log.append((self.name, request.generated_prefix))
            return self.act(request)

        update_weights = abort = sleep = wake = None

        def stats(self):
            return {}

    def interrupted(request):
        return Completion(request.id, (4, 5, 6), (-0.1,) * 3, "abort", (0,) * 3, is_interrupted=True)

    def dies(request):
        raise WorkerError("killed")

    def ends(request):
        return Completion(request.id, (7, 8), (-0.2,) * 2, "stop", (1,) * 2)

    log = []
    acts = [interrupted, dies, ends]

    def next_act(request):
        return acts[len(log) - 1](request)

    service = SamplerService({str(n): Replica(n, next_act) for n in range(3)})
    done = asyncio.run(service.generate(Request("a", (1,), SamplingParams(max_tokens=9), uid="row", session="talk")))
    assert [prefix for _, prefix in log] == [(), (4, 5, 6), (4, 5, 6)]
    assert log[1][0] != log[2][0]
    assert (done.token_ids, done.token_versions) == ((4, 5, 6, 7, 8), (0, 0, 0, 1, 1))
    assert done.log_probs == (-0.1,) * 3 + (-0.2,) * 2 and done.finish_reason == "stop" and not done.is_interrupted
    assert service.stats()["interrupted"] == 1 and service.stats()["resent"] == 1


def test_attempts_join_in_order_and_log_probs_stay_only_if_all_have_them():
    first = Completion("a", (4, 5), (-0.1, -0.2), "abort", (0, 0), num_preempted=1)
    second = Completion("a", (6,), (-0.3,), "stop", (1,), num_preempted=-1)
    assert join_attempts([first, second]) == Completion(
        "a", (4, 5, 6), (-0.1, -0.2, -0.3), "stop", (0, 0, 1), num_preempted=1
    )
    assert join_attempts([first, Completion("a", (6,), (), "stop", (1,))]).log_probs == ()
    assert continued(continued(ASKED, first), second).generated_prefix == (4, 5, 6)
