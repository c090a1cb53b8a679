"""What the sampler promises about any batch: independence, bitwise repetition, prompts computed once, freed memory."""

from __future__ import annotations

import asyncio
import copy

import pytest

from tests.harness.programs import python
from tests.harness.samplers import prompt, renamed, requests, sample, tiny_model
from verl.rollout.hf.sampler import HFSampler

TINIEST = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def test_ten_thousand_requests_do_not_depend_on_what_else_is_in_the_batch():
    model = tiny_model(**TINIEST, intermediate_size=8)
    lengths = [1 + (7 * i) % 29 for i in range(2500)]
    wanted = requests([prompt(n, i) for i, n in enumerate(lengths)], samples=4, max_tokens=[3, 9, 1, 5, 7])
    assert len(wanted) == 10_000
    found = sample(HFSampler(model, max_num_seqs=256), wanted)
    other = sample(HFSampler(copy.deepcopy(model), owns_model=True, max_num_seqs=193), wanted[::-1])[::-1]
    worst = 0.0
    for a, b in zip(found, other):
        assert a.token_ids == b.token_ids and a.request_id == b.request_id
        worst = max(worst, *(abs(x - y) for x, y in zip(a.log_probs, b.log_probs)))
    assert worst < 2e-5
    alone = HFSampler(model)
    for index in range(0, 10_000, 397):
        assert sample(alone, [wanted[index]])[0].token_ids == found[index].token_ids


WIDE = {"hidden_size": 128, "intermediate_size": 1152}
"""Sums over so many products are cut otherwise for 8 rows than for 16, on processors with AVX-512."""


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["narrow", "wide"])
def test_full_determinism_is_bitwise_alone_in_a_batch_of_256_and_when_sent_again_to_another_sampler(sizes):
    model = tiny_model(**sizes)
    wanted = requests([prompt(1 + n % 37, n) for n in range(64)], samples=4, max_tokens=[2, 11, 5], temperature=0.8)
    assert len(wanted) == 256
    together = sample(HFSampler(model, full_determinism=True), wanted)
    replica = HFSampler(copy.deepcopy(model), full_determinism=True, max_num_seqs=100)
    for index in (0, 1, 77, 130, 255):
        assert sample(replica, [wanted[index]])[0] == together[index]
    again = sample(replica, [renamed(request, id=f"again {request.id}") for request in wanted[::3]])
    for first, second in zip(together[::3], again):
        assert (first.token_ids, first.log_probs) == (second.token_ids, second.log_probs)


def test_sixteen_samples_of_a_prompt_cost_one_prefill():
    model = tiny_model()
    wanted = requests([prompt(40, n) for n in range(5)], samples=16, max_tokens=4, ignore_eos=True)
    shared, unshared = HFSampler(model), HFSampler(model, share_prompts=False)
    sample(shared, wanted), sample(unshared, wanted)
    ratio = shared.stats()["prefill_tokens"] / unshared.stats()["prefill_tokens"]
    assert ratio <= 1.1 / 16


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def memory_of_sleep() -> None:
    """Runs in a process of its own, where nothing else frees or takes memory."""
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = tiny_model("llama", **shape)
    for arguments in ({}, {"owns_model": True}, {"owns_model": True, "record": True}):
        sampler = HFSampler(model, **arguments)
        sample(sampler, requests([prompt(8, 1)], max_tokens=2))
        asyncio.run(sampler.sleep())
        asyncio.run(sampler.wake())
        start = resident_bytes()
        wanted = requests([prompt(8, n) for n in range(48)], max_tokens=110, ignore_eos=True)
        pools: list[tuple[float, int]] = []
        asyncio.run(_until_nearly_done(sampler, wanted, pools))
        asyncio.run(sampler.sleep())
        after = resident_bytes()
        pool, before = pools[0]
        # Room that no token was written to yet is not resident.
        held = min(pool, before - start)
        assert held > 30 << 20, (arguments, pool, before, start)
        assert before - after >= 0.8 * held, (arguments, pool, start, before, after)
    print("freed")


async def _until_nearly_done(sampler: HFSampler, wanted: list, pools: list) -> None:
    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
    while True:
        await asyncio.sleep(0)
        lengths = [len(row.tokens) for row in sampler._in_flight.values()]
        if len(lengths) == len(wanted) and min(lengths) >= 100:
            break
    pools.append((sampler.stats()["cache_bytes"], resident_bytes()))
    await asyncio.gather(*tasks)


@pytest.mark.slow
def test_sleep_gives_the_memory_of_the_cache_back_to_the_machine():
    code = "from tests.rollout.hf.test_contract import memory_of_sleep; memory_of_sleep()"
    done = python("-c", code)
    assert done.stdout.strip() == "freed"
