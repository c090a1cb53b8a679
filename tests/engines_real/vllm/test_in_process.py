"""vLLM in this process: its log-probs are the trainer's, it takes new weights, and mistakes stay the caller's own."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.harness.engines import make_engine
from tests.harness.samplers import reference_log_probs, requests, sample
from verl.agent_loop import AgentLoopOutput
from verl.agent_loop.batch import to_batch
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig
from verl.engines.plain import PlainEngine
from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import WeightChunk, chunk_weights

PROMPTS = [(40, 41, 42), (50, 51, 52, 53, 54, 55), tuple(range(60, 90))]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def sampler(folder):
    made = VLLMSampler({"model": str(folder), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 16})
    yield made
    made.close()


def fresh(sampler, folder):
    """The engine with the weights of the folder."""
    model = HFSampler(str(folder), device="cpu").model
    update(sampler, list(model.state_dict().items()), version=1)
    return sampler


def update(sampler, weights, version):
    asyncio.run(sampler.update_weights(chunk_weights(weights, 1 << 16, version), version))


def as_batch(wanted, found):
    outputs = [
        AgentLoopOutput(
            prompt_ids=[*request.token_ids, *request.generated_prefix],
            response_ids=list(done.token_ids),
            response_mask=[1] * len(done.token_ids),
            response_logprobs=list(done.log_probs),
        )
        for request, done in zip(wanted, found)
    ]
    return to_batch(outputs, pad_token_id=0)


def trained_log_probs(engine, batch, temperature):
    return engine.infer(batch, temperature=temperature)["log_probs"]


def difference(engine, wanted, found, temperature=1.0):
    batch = as_batch(wanted, found)
    gap = batch.tensors["rollout_log_probs"] - trained_log_probs(engine, batch, temperature)
    return (gap * batch.tensors["response_mask"]).abs().max().item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_vllm_and_of_the_trainer_are_equal(sampler, folder, temperature):
    fresh(sampler, folder)
    wanted = requests(PROMPTS, samples=3, max_tokens=12, temperature=temperature, ignore_eos=True)
    found = sample(sampler, wanted)
    engine = PlainEngine(HFModelConfig(path=str(folder)), FSDPEngineConfig(), seed=0)
    assert [len(done.token_ids) for done in found] == [12] * 9
    assert difference(engine, wanted, found, temperature) < TOLERANCE
    assert len({done.token_ids for done in found}) > 6


def test_a_penalty_and_a_shortest_response_are_those_of_the_built_in_sampler(sampler, folder):
    fresh(sampler, folder)
    wanted = requests(PROMPTS, max_tokens=12, min_tokens=[0, 9, 4], do_sample=False, repetition_penalty=[1.3, 1.0, 0.7])
    ours = sample(HFSampler(str(folder), device="cpu"), wanted)
    theirs = sample(sampler, wanted)
    assert [done.token_ids for done in theirs] == [done.token_ids for done in ours]
    for one, other in zip(theirs, ours):
        assert one.log_probs == pytest.approx(other.log_probs, abs=TOLERANCE)


def test_after_three_steps_of_training_they_differ_until_the_weights_are_synced(sampler, folder):
    fresh(sampler, folder)
    engine = make_engine(folder)
    wanted = requests(PROMPTS, samples=2, max_tokens=8, ignore_eos=True)
    batch = as_batch(wanted, sample(sampler, wanted))
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
    batch.tensors["advantages"] = batch.tensors["response_mask"] * torch.tensor([1.0, -1.0] * len(PROMPTS))[:, None]
    for _ in range(3):
        engine.train_batch(batch, PPOPolicyLoss(ActorConfig()), temperature=1.0)
    stale = sample(sampler, wanted)
    assert difference(engine, wanted, stale) > 1e-2
    update(sampler, engine.export_weights(), version=2)
    assert difference(engine, wanted, sample(sampler, wanted)) < TOLERANCE
    assert {v for done in sample(sampler, wanted) for v in done.token_versions} == {2}


def test_a_request_gets_the_same_tokens_again_whatever_runs_beside_it(sampler, folder):
    fresh(sampler, folder)
    wanted = requests(PROMPTS, samples=4, max_tokens=10, ignore_eos=True)
    together = sample(sampler, wanted)
    alone = [sample(sampler, [request])[0] for request in wanted[::5]]
    assert [done.token_ids for done in alone] == [done.token_ids for done in together[::5]]


def test_new_weights_pause_running_requests_which_go_on_with_them(sampler, folder, monkeypatch):
    """Three versions draw one response; under the model of its version each token has the reported log-prob."""
    monkeypatch.setattr(sampler, "at_update", "pause")
    fresh(sampler, folder)
    models = {1: HFSampler(str(folder)).model, 2: HFSampler(str(folder)).model, 3: HFSampler(str(folder)).model}
    for version, model in models.items():
        model.lm_head.weight.data *= 1 + 0.2 * (version - 1)
    wanted = requests(PROMPTS, max_tokens=60, ignore_eos=True)

    async def run():
        tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
        for version in (2, 3):
            while sum(len(running.token_ids) > 8 for running in sampler._running.values()) < len(wanted):
                await asyncio.sleep(0.001)
            weights = chunk_weights(models[version].state_dict().items(), 1 << 16, version)
            await sampler.update_weights(weights, version)
        return await asyncio.gather(*tasks)

    for request, done in zip(wanted, asyncio.run(asyncio.wait_for(run(), 60))):
        assert len(done.token_ids) == len(done.log_probs) == 60 and set(done.token_versions) == {1, 2, 3}
        for version, model in models.items():
            logs = reference_log_probs(model, request, done).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
            drawn = torch.tensor(done.token_versions) == version
            assert (logs[drawn] - torch.tensor(done.log_probs)[drawn]).abs().max() < 10 * TOLERANCE


def test_an_aborted_request_returns_what_it_has_and_can_be_continued(sampler, folder):
    fresh(sampler, folder)

    async def run():
        task = asyncio.ensure_future(
            sampler.generate(Request("a", PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True)))
        )
        while not any(running.token_ids for running in sampler._running.values()):
            await asyncio.sleep(0.01)
        assert await sampler.abort() == 1
        part = await task
        rest = SamplingParams(max_tokens=len(part.token_ids) + 5, ignore_eos=True)
        return part, await sampler.generate(Request("a", PROMPTS[1], rest, generated_prefix=part.token_ids))

    part, rest = asyncio.run(run())
    assert part.finish_reason == "abort" and 0 < len(part.token_ids) < 400
    assert len(rest.token_ids) == 5 and rest.finish_reason == "length"


def test_new_weights_wait_for_running_requests_and_waiting_requests_get_the_new_ones(sampler, folder):
    fresh(sampler, folder)
    model = HFSampler(str(folder), device="cpu").model
    weights = [(name, value * 1.1) for name, value in model.state_dict().items()]

    async def run():
        long = asyncio.ensure_future(
            sampler.generate(Request("long", PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True)))
        )
        await asyncio.sleep(0.05)
        sync = asyncio.ensure_future(sampler.update_weights(chunk_weights(weights, 1 << 16, 9), 9))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(
            sampler.generate(Request("late", PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True)))
        )
        return await asyncio.wait_for(asyncio.gather(long, sync, late), 60)

    long, _, late = asyncio.run(run())
    assert set(long.token_versions) == {1} and len(long.token_ids) == 40
    assert set(late.token_versions) == {9}


def test_a_prompt_that_was_seen_is_not_computed_again(sampler, folder):
    fresh(sampler, folder)
    before = sampler.stats()["cached_tokens"]
    prompt = tuple(range(30, 250))
    for index in range(2):
        sample(sampler, [Request(str(index), prompt, SamplingParams(max_tokens=2))])
    assert sampler.stats()["cached_tokens"] - before >= 128


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("a", (), SamplingParams()), "the prompt is empty"),
        (Request("a", (5, 259), SamplingParams()), "outside the vocabulary"),
        (Request("a", (5,), SamplingParams(max_tokens=10**9)), "longer than the model's context"),
        (Request("a", (5,), SamplingParams(temperature=-1.0)), "not a temperature"),
        (Request("a", (5,), SamplingParams(max_tokens=4, top_k=-7)), "not a number of tokens"),
    ],
)
def test_an_absurd_request_is_refused_and_the_others_go_on(sampler, folder, request_, said):
    fresh(sampler, folder)

    async def run():
        good = sampler.generate(Request("good", PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True)))
        return await asyncio.wait_for(asyncio.gather(good, sampler.generate(request_), return_exceptions=True), 60)

    good, bad = asyncio.run(run())
    assert len(good.token_ids) == 4
    assert isinstance(bad, RolloutError) and said in str(bad)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: w[:-1], "did not arrive"),
        (lambda w: [*w, ("nonsense", torch.ones(3))], "no such weight"),
        (lambda w: [(n, v[:1]) if n == "model.norm.weight" else (n, v) for n, v in w], "another shape in the sampler"),
    ],
)
def test_an_update_that_is_not_whole_stops_the_sampler_until_one_is(sampler, folder, spoil, said):
    fresh(sampler, folder)
    weights = sorted(
        HFSampler(str(folder), device="cpu").model.state_dict().items(),
        key=lambda item: item[0] == "model.embed_tokens.weight",
    )
    with pytest.raises(RolloutError, match=said):
        update(sampler, spoil(weights), version=5)
    with pytest.raises(RolloutError, match="send them again"):
        sample(sampler, requests(PROMPTS[:1], max_tokens=2))
    update(sampler, weights, version=6)
    assert sample(sampler, requests(PROMPTS[:1], max_tokens=2))[0].token_versions[0] == 6


def test_an_interrupted_stream_of_weights_is_refused(sampler, folder):
    fresh(sampler, folder)
    weights = list(HFSampler(str(folder), device="cpu").model.state_dict().items())
    with pytest.raises(RolloutError, match="interrupted"):
        asyncio.run(sampler.update_weights([WeightChunk(3, weights, last=False)], 3))


def test_after_a_stream_that_failed_half_way_a_whole_one_is_taken(sampler, folder):
    fresh(sampler, folder)
    wanted = requests(PROMPTS[:1], max_tokens=6, ignore_eos=True)
    expected = sample(sampler, wanted)
    model = HFSampler(str(folder), device="cpu").model
    chunks = list(chunk_weights(((n, v * 2) for n, v in model.state_dict().items()), 1 << 16, 4))

    def failing():
        yield from chunks[: len(chunks) // 2]
        raise RolloutError("the trainer is gone")

    with pytest.raises(RolloutError, match="the trainer is gone"):
        asyncio.run(sampler.update_weights(failing(), 4))
    update(sampler, list(model.state_dict().items()), version=5)
    found = sample(sampler, wanted)
    assert found[0].token_ids == expected[0].token_ids
    assert found[0].log_probs == pytest.approx(expected[0].log_probs, abs=1e-6)
