"""Decoding over rows that keep their places: the same results, few layouts, a cache with a limit.

Recording needs a GPU (`tests/gpu`); the bookkeeping and the buffers are the same here.
"""

from __future__ import annotations

import asyncio
import copy

import pytest

from tests.harness.samplers import largest_difference, prompt, renamed, requests, sample, tiny_model
from verl.errors import RolloutError
from verl.metrics import notices
from verl.rollout.hf.pool_runner import PoolRunner
from verl.rollout.hf.sampler import HFSampler

WANTED = requests(
    [prompt(n, n) for n in (1, 9, 63, 64, 65, 130)], samples=3, max_tokens=[4, 80, 13, 1], temperature=0.7
)


def recording(model, **arguments) -> HFSampler:
    sampler = HFSampler(copy.deepcopy(model), owns_model=True, record=True, **arguments)
    assert sampler._runner.policy.record_after is not None
    return sampler


def token_bytes(model) -> int:
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * 4 * (32 // 4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_log_probs_equal_a_plain_forward_pass(family):
    model = tiny_model(family, scale=2.0)
    assert largest_difference(model, WANTED, sample(recording(model), WANTED)) < 2e-5


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 5}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}])
def test_tokens_are_those_of_rows_that_move(limits):
    model = tiny_model()
    expected = [c.token_ids for c in sample(HFSampler(model), WANTED)]
    sampler = recording(model, **limits)
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected
    assert [c.token_ids for c in sample(sampler, WANTED[::-1])][::-1] == expected


def test_a_layout_outlasts_rows_that_end_until_a_quarter_of_them_has(monkeypatch):
    made, new = [], PoolRunner._new_replay
    monkeypatch.setattr(PoolRunner, "_new_replay", lambda self, plans: made.append(plans) or new(self, plans))
    model = tiny_model()
    wanted = requests([prompt(8, n) for n in range(16)], max_tokens=[30] * 12 + [9, 10, 11, 12], ignore_eos=True)
    sampler = recording(model)
    made.clear()
    found = sample(sampler, wanted)
    # Places for 16 tokens a row, 8 of them the prompt's: full when the first row ends. Then 32, and the next three that
    # end are a fifth of 15. What is left moves once more, and is gone.
    assert [sum(len(plan.rows) for plan in plans) for plans in made] == [16, 15, 12, 0]
    assert largest_difference(model, wanted, found) < 2e-5


def test_a_row_that_ended_never_leaves_the_models_context():
    model = tiny_model(max_position_embeddings=40)
    wanted = requests([prompt(30, n) for n in range(12)], max_tokens=[2] * 11 + [10], ignore_eos=True)
    wanted[0] = renamed(wanted[0], token_ids=prompt(38, 0))
    longest = requests([prompt(4, 3)], samples=8, max_tokens=36, ignore_eos=True)
    wanted += [renamed(request, id=f"long {request.id}") for request in longest]
    assert largest_difference(model, wanted, sample(recording(model), wanted)) < 2e-5


def test_rows_wait_while_the_cache_is_full():
    model = tiny_model()
    wanted = requests([prompt(10, n) for n in range(9)], max_tokens=60, ignore_eos=True)
    sampler = recording(model, cache_bytes=170 * token_bytes(model))  # a row takes 70 of 170 tokens
    seen = []
    step = sampler._runner.step
    sampler._runner.step = lambda chunks: seen.append(len(sampler._runner.rows)) or step(chunks)
    found = sample(sampler, wanted)
    assert max(seen) == 2 and not sampler._runner._promised
    assert [c.token_ids for c in found] == [c.token_ids for c in sample(HFSampler(model), wanted)]


async def test_a_request_larger_than_the_cache_is_refused_and_others_go_on():
    model = tiny_model()
    sampler = recording(model, cache_bytes=128 * token_bytes(model))
    good = requests([prompt(10, 1)], max_tokens=20)[0]
    large = renamed(good, id="large", token_ids=prompt(120, 2))

    found = await asyncio.gather(*map(sampler.generate, [large, good]), return_exceptions=True)
    assert isinstance(found[0], RolloutError) and "at most 128 tokens" in str(found[0])
    assert found[1].token_ids


async def test_an_aborted_and_a_cancelled_request_give_their_room_back():
    model = tiny_model()
    sampler = recording(model, max_num_batched_tokens=8, max_num_seqs=4, cache_bytes=800 * token_bytes(model))
    wanted = requests([prompt(30, n) for n in range(3)], max_tokens=200, ignore_eos=True)

    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
    for _ in range(7):
        await asyncio.sleep(0)
    assert sampler._runner._promised and sampler._runner.rows, "one is computed, one decodes"
    tasks[0].cancel()
    await sampler.abort([wanted[1].id, wanted[2].id])
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not sampler._runner._promised


def test_sleep_frees_the_cache_and_sampling_goes_on_after_waking():
    model = tiny_model()
    sampler = recording(model)
    expected = [c.token_ids for c in sample(sampler, WANTED)]
    assert sampler.stats()["cache_bytes"] > 0
    asyncio.run(sampler.sleep())
    assert sampler.stats()["cache_bytes"] == 0
    asyncio.run(sampler.wake())
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected


@pytest.mark.parametrize(
    ("family", "owned", "why"),
    [("gemma2", True, "its family is not written out"), ("qwen2", False, "the sampler does not own its weights")],
)
def test_a_model_that_decodes_without_graphs_says_why(family, owned, why):
    model = tiny_model(family)
    sampler = HFSampler(model, owns_model=owned, record=True)
    assert sampler._runner.policy.record_after is None
    assert why in notices()[f"CUDA graphs, {type(model).__name__}"]
