"""Decoding over a paged cache: the same results as over the pool, pages that come back, waiting when there are none.

CUDA graphs and kernels need a GPU (`tests/gpu`); bookkeeping and the plain operations are the same here.
"""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from tests.rollout.builders import largest_difference, prompt, renamed, requests, sample, tiny_model
from verl.errors import RolloutError
from verl.metrics import notices, reset_notices
from verl.rollout.hf.graph_runner import GraphRunner
from verl.rollout.hf.paged_cache import PAGE
from verl.rollout.hf.pool_runner import PoolRunner
from verl.rollout.hf.sampler import HFSampler

WANTED = requests(
    [prompt(n, n) for n in (1, 9, 63, 64, 65, 130)], samples=3, max_tokens=[4, 80, 13, 1], temperature=0.7
)


def paged(model, **arguments) -> HFSampler:
    sampler = HFSampler(copy.deepcopy(model), owns_model=True, paged=True, **arguments)
    assert isinstance(sampler._runner, GraphRunner)
    return sampler


def free_pages(sampler: HFSampler) -> tuple[int, int]:
    cache = sampler._runner._ready_cache()
    return cache.num_available, cache.num_pages - 1


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_log_probs_equal_a_plain_forward_pass(family):
    model = tiny_model(family, scale=2.0)
    sampler = paged(model)
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 2e-5
    assert len(set(free_pages(sampler))) == 1, "every page came back"


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 5}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}])
def test_tokens_are_those_of_the_pool(limits):
    model = tiny_model()
    expected = [c.token_ids for c in sample(HFSampler(model), WANTED)]
    sampler = paged(model, **limits)
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected
    assert [c.token_ids for c in sample(sampler, WANTED[::-1])][::-1] == expected


def page_bytes(model) -> int:
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * PAGE * 4 * (32 // 4)


def test_rows_wait_while_there_are_no_pages():
    model = tiny_model()
    wanted = requests([prompt(10, n) for n in range(9)], max_tokens=60, ignore_eos=True)
    sampler = paged(model, cache_bytes=4 * page_bytes(model))  # a row takes 2 of the 4 pages
    seen = []
    step = sampler._runner.step
    sampler._runner.step = lambda chunks: seen.append(len(sampler._runner.rows)) or step(chunks)
    found = sample(sampler, wanted)
    assert max(seen) == 2 and free_pages(sampler) == (4, 4)
    assert [c.token_ids for c in found] == [c.token_ids for c in sample(HFSampler(model), wanted)]


def test_a_request_larger_than_the_cache_is_refused_and_others_go_on():
    model = tiny_model()
    sampler = paged(model, cache_bytes=2 * page_bytes(model))
    good = requests([prompt(10, 1)], max_tokens=20)[0]
    large = renamed(good, id="large", token_ids=prompt(120, 2))

    async def run():
        return await asyncio.gather(*map(sampler.generate, [large, good]), return_exceptions=True)

    found = asyncio.run(run())
    assert isinstance(found[0], RolloutError) and "at most 128 tokens" in str(found[0])
    assert found[1].token_ids


def test_samples_of_a_prompt_share_its_whole_pages():
    model = tiny_model()
    sampler = paged(model)
    wanted = requests([prompt(2 * PAGE + 5, 1)], samples=8, max_tokens=10, ignore_eos=True)
    least = [free_pages(sampler)[1]]
    step = sampler._runner.step

    def watched(chunks):
        found = step(chunks)
        least[0] = min(least[0], len(sampler._runner._cache._free))
        return found

    sampler._runner.step = watched
    found = sample(sampler, wanted)
    assert free_pages(sampler)[1] - least[0] == 2 + 8, "two for all, one for each"
    assert largest_difference(model, wanted, found) < 2e-5


def test_an_aborted_and_a_cancelled_request_give_their_pages_back():
    sampler = paged(tiny_model(), max_num_batched_tokens=8, max_num_seqs=4)
    wanted = requests([prompt(30, n) for n in range(3)], max_tokens=200, ignore_eos=True)

    async def run():
        tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
        for _ in range(7):
            await asyncio.sleep(0)
        assert sampler._runner._promised and sampler._runner.rows, "one is computed, one decodes"
        tasks[0].cancel()
        await sampler.abort([wanted[1].id, wanted[2].id])
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert len(set(free_pages(sampler))) == 1


def test_a_failing_step_frees_the_cache_and_the_next_requests_work():
    sampler = paged(tiny_model(), max_num_seqs=2)
    wanted = requests([prompt(30, n) for n in range(3)], max_tokens=5, ignore_eos=True)
    step, calls = sampler._runner.step, []

    def broken(chunks):
        calls.append(len(chunks))
        if len(calls) == 2:
            raise MemoryError("the machine is full")
        return step(chunks)

    sampler._runner.step = broken

    async def run():
        return await asyncio.gather(*map(sampler.generate, wanted), return_exceptions=True)

    found = asyncio.run(run())
    assert [type(x) for x in found[:2]] == [MemoryError, MemoryError] and len(found[2].token_ids) == 5
    assert len(set(free_pages(sampler))) == 1 and len(sample(sampler, wanted)) == 3


def test_sleep_frees_the_cache_and_sampling_goes_on_after_waking():
    model = tiny_model()
    sampler = paged(model)
    expected = [c.token_ids for c in sample(sampler, WANTED)]
    assert sampler.stats()["cache_bytes"] > 0
    asyncio.run(sampler.sleep())
    assert sampler.stats()["cache_bytes"] == 0
    asyncio.run(sampler.wake())
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected


def test_a_family_that_is_not_written_out_decodes_without_fixed_shapes_and_says_so():
    reset_notices()
    sampler = HFSampler(tiny_model("gemma2"), owns_model=True, paged=True)
    assert isinstance(sampler._runner, PoolRunner)
    assert "not written out" in notices()["CUDA graphs, Gemma2ForCausalLM"]


def test_bfloat16_log_probs_are_close():
    model = tiny_model(scale=1.0).to(torch.bfloat16)
    assert largest_difference(model, WANTED, sample(paged(model), WANTED)) < 0.05
