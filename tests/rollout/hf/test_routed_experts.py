"""The experts that the `hf` sampler reports are those of a plain forward pass over each sequence."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from tests.harness.samplers import prompt, requests, sample, tiny_model
from verl.agent_loop import AgentLoopOutput
from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.batch import to_batch
from verl.errors import ModelError
from verl.models.router_replay import NO_RECORD
from verl.models.routers import router_modules
from verl.rollout import Request, SamplingParams
from verl.rollout.base import Completion
from verl.rollout.hf.padded_runner import PaddedRunner
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.resume import continued, join_attempts

MIXTURES = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
WANTED = requests([prompt(n, n) for n in (3, 9, 30)], samples=3, max_tokens=[4, 20, 1], temperature=0.9)


@pytest.fixture(scope="module", params=MIXTURES)
def model(request):
    return tiny_model(request.param, **MIXTURES[request.param])


def chosen(model, ids) -> np.ndarray:
    """(tokens, layers, top_k) by one pass over a sequence, read where each router returns them."""
    seen = []
    handles = [r.register_forward_hook(lambda _, __, out: seen.append(out[2])) for r in router_modules(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).numpy()


def check(model, request, done) -> None:
    ids = [*request.token_ids, *request.generated_prefix, *done.token_ids]
    assert done.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(done.routed_experts, chosen(model, ids[:-1]))


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 7}])
def test_every_token_but_the_last_has_the_experts_of_a_plain_pass(model, limits):
    """Prompts that are shared, and prompts that are computed in pieces."""
    sampler = HFSampler(model, record_experts=True, **limits)
    for request, done in zip(WANTED, sample(sampler, WANTED), strict=True):
        check(model, request, done)


def test_so_has_it_through_transformers_own_cache(model):
    sampler = HFSampler(model, record_experts=True)
    recorder = sampler._runner.recorder
    sampler._runner = PaddedRunner(model)
    sampler._runner.recorder = recorder
    sampler._scheduler.can_chunk = sampler._scheduler.keeps_prompts = False
    for request, done in zip(WANTED, sample(sampler, WANTED), strict=True):
        check(model, request, done)


def test_nothing_is_reported_unasked_and_the_tokens_are_the_same(model):
    silent, telling = (sample(HFSampler(model, record_experts=on), WANTED) for on in (False, True))
    assert all(done.routed_experts is None for done in silent)
    assert [(a.token_ids, a.log_probs) for a in silent] == [(b.token_ids, b.log_probs) for b in telling]


def test_what_an_interrupted_response_chose_before_stays():
    """The second attempt computes the prefix with other weights, and other experts than those that drew it."""
    first, second = (tiny_model("qwen3_moe", seed=seed, **MIXTURES["qwen3_moe"]) for seed in (0, 1))
    request = Request("a", prompt(6, 1), SamplingParams(max_tokens=12, ignore_eos=True), uid="a")

    async def attempt(model, asked, stop_after):
        sampler = HFSampler(model, record_experts=True)
        task = asyncio.ensure_future(sampler.generate(asked))
        while sampler.stats()["response_tokens"] < stop_after:
            await asyncio.sleep(0)
        await sampler.abort()
        return await task

    one = asyncio.run(attempt(first, request, 5))
    rest = continued(request, one)
    two = sample(HFSampler(second, record_experts=True), [rest])[0]
    done = join_attempts([one, two])
    ids, before = [*request.token_ids, *done.token_ids][:-1], 6 + len(one.token_ids) - 1
    assert one.finish_reason == "abort" and 5 <= len(one.token_ids) < 12 and len(done.token_ids) == 12
    expected = np.concatenate([chosen(first, ids)[:before], chosen(second, ids)[before:]])
    np.testing.assert_array_equal(done.routed_experts, expected)
    assert (two.routed_experts[:before] != one.routed_experts).any()
    unknown = Completion("a", (7,), (-0.1,), "abort", (0,))
    assert len(join_attempts([unknown, two]).routed_experts) == len(two.routed_experts)


def test_a_conversation_keeps_the_experts_of_the_turn_that_drew_a_token():
    """New weights between two turns: of the first answer all but its last token went through the first model."""
    first, second = (tiny_model("qwen3_moe", seed=seed, **MIXTURES["qwen3_moe"]) for seed in (0, 1))
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    data = AgentData({}, prompt_ids=list(prompt(6, 1)))
    for turn, model in enumerate((first, second)):
        asked = Request(f"turn{turn}", (*data.prompt_ids, *data.response_ids), sampling, uid="a")
        data.add_sampled(sample(HFSampler(model, record_experts=True), [asked])[0])
        if turn == 0:
            data.add_inserted(prompt(3, 2))
    short = AgentLoopOutput(prompt_ids=[5], response_ids=[6], response_mask=[1])
    tensors = to_batch([data.output(), short], pad_token_id=0).tensors
    ids, before = [*data.prompt_ids, *data.response_ids], 6 + 5 - 1
    expected = np.concatenate([chosen(first, ids[:-1])[:before], chosen(second, ids[:-1])[before:]])
    assert tensors["response_mask"][0].tolist() == [1] * 5 + [0] * 3 + [1] * 5
    experts = tensors["routed_experts"]
    np.testing.assert_array_equal(experts[0][tensors["attention_mask"][0].bool()][:-1], expected)
    assert (experts[0, -1] == NO_RECORD).all() and (experts[1] == NO_RECORD).all()


def test_a_dense_model_has_none_to_report():
    with pytest.raises(ModelError, match="no routers"):
        HFSampler(tiny_model(), record_experts=True)
