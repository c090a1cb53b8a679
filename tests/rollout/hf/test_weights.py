"""New weights: versions never mix, checks name what is wrong, sleep frees and wake restores."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.harness.samplers import largest_difference, prompt, requests, sample, tiny_model
from verl.errors import RolloutError
from verl.models import export_weights
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import WeightChunk, chunk_weights

WANTED = requests([prompt(5, 1), prompt(28, 2)], samples=4, max_tokens=12, ignore_eos=True)


def push(sampler: HFSampler, model, version: int, bucket_bytes: int = 2000) -> None:
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(model), bucket_bytes, version), version))


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "gemma2"])
def test_after_an_update_the_sampler_is_the_new_model_and_says_so(family):
    old, new = tiny_model(family, scale=2.0), tiny_model(family, seed=1, scale=2.0)
    sampler = HFSampler(old)
    before = sample(sampler, WANTED)
    assert {v for c in before for v in c.token_versions} == {0}
    push(sampler, new, 3)
    after = sample(sampler, WANTED)
    assert sampler.version == 3 and {v for c in after for v in c.token_versions} == {3}
    assert largest_difference(new, WANTED, after) < 2e-5
    assert largest_difference(new, WANTED, before) > 0.1


def test_a_mixture_model_takes_weights_under_the_names_they_have_on_disk():
    kind = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    old, new = (tiny_model("qwen3_moe", seed=s, scale=1.0, **kind) for s in (0, 1))
    sampler = HFSampler(old)
    push(sampler, new, 1)
    assert largest_difference(new, WANTED, sample(sampler, WANTED)) < 2e-5


async def test_running_requests_end_with_the_old_weights_and_waiting_ones_start_with_the_new():
    old, new = tiny_model(), tiny_model(seed=1)
    sampler = HFSampler(old, max_num_seqs=2)
    wanted = requests([prompt(4, n) for n in range(4)], max_tokens=15, ignore_eos=True)
    reference = tiny_model()

    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
    for _ in range(6):
        await asyncio.sleep(0)
    await sampler.update_weights(chunk_weights(export_weights(new), 1 << 20, 9), 9)
    found = await asyncio.gather(*tasks)
    assert [set(c.token_versions) for c in found] == [{0}, {0}, {9}, {9}]
    assert largest_difference(reference, wanted[:2], found[:2]) < 2e-5
    assert largest_difference(new, wanted[2:], found[2:]) < 2e-5


async def test_a_prompt_computed_in_pieces_starts_again_after_an_update():
    old, new = tiny_model(), tiny_model(seed=1)
    sampler = HFSampler(old, max_num_seqs=4, max_num_batched_tokens=8)
    wanted = requests([prompt(40, 1)], samples=3, max_tokens=4, ignore_eos=True)

    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
    for _ in range(4):
        await asyncio.sleep(0)
    assert 0 < sampler.stats()["prefill_tokens"] < 40
    await sampler.update_weights(chunk_weights(export_weights(new), 1 << 20, 1), 1)
    found = await asyncio.gather(*tasks)
    assert {v for c in found for v in c.token_versions} == {1}
    assert largest_difference(new, wanted, found) < 2e-5


def test_an_interrupted_update_is_refused_and_a_whole_one_heals():
    model, new = tiny_model(), tiny_model(seed=1)
    sampler = HFSampler(model)
    chunks = list(chunk_weights(export_weights(new), 2000, 5))
    with pytest.raises(RolloutError, match="interrupted"):
        asyncio.run(sampler.update_weights(chunks[:-1], 5))
    with pytest.raises(RolloutError, match="update of its weights to version 5 did not finish"):
        sample(sampler, WANTED)
    asyncio.run(sampler.wake())
    with pytest.raises(RolloutError, match="did not finish"):
        sample(sampler, WANTED)
    push(sampler, new, 6)
    assert largest_difference(new, WANTED, sample(sampler, WANTED)) < 2e-5


async def test_a_trainer_that_fails_while_it_exports_leaves_an_unusable_sampler_and_its_own_error():
    sampler = HFSampler(tiny_model())

    def broken():
        yield WeightChunk(1, [("model.norm.weight", torch.ones(32))], last=False)
        raise ZeroDivisionError("the trainer's bug")

    waiting = asyncio.ensure_future(sampler.generate(WANTED[0]))
    with pytest.raises(ZeroDivisionError):
        await sampler.update_weights(broken(), 1)
    (error,) = await asyncio.gather(waiting, return_exceptions=True)
    assert "did not finish" in str(error), "who waited is told, not left waiting"


def test_unknown_and_missing_weights_and_other_shapes_are_named():
    model = tiny_model()
    sampler = HFSampler(model)
    weights = dict(export_weights(tiny_model(seed=1)))

    def send(**changes):
        given = {name: value for name, value in {**weights, **changes}.items() if value is not None}
        asyncio.run(sampler.update_weights(chunk_weights(given.items(), 1 << 20, 1), 1))

    with pytest.raises(RolloutError, match=r"model\.norm\.weights: .*no such weight.*model\.norm\.weight'"):
        send(**{"model.norm.weights": torch.ones(32)})
    with pytest.raises(RolloutError, match=r"1 weights did not arrive: lm_head\.weight"):
        send(**{"lm_head.weight": None})
    with pytest.raises(RolloutError, match=r"model\.norm\.weight: .*another shape.*\(31,\).*\(32,\)"):
        send(**{"model.norm.weight": torch.ones(31)})


def test_sleep_frees_the_cache_and_level_two_the_weights():
    model = tiny_model()
    sampler = HFSampler(model)
    expected = [c.token_ids for c in sample(sampler, WANTED)]
    assert sampler.stats()["cache_bytes"] > 0
    asyncio.run(sampler.sleep())
    assert sampler.stats()["cache_bytes"] == 0
    with pytest.raises(RolloutError, match="sleeps"):
        sample(sampler, WANTED)
    asyncio.run(sampler.wake())
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected
    asyncio.run(sampler.sleep(2))
    assert model.lm_head.weight.untyped_storage().nbytes() == 0
    asyncio.run(sampler.wake())
    with pytest.raises(RolloutError, match="freed by sleep"):
        sample(sampler, WANTED)
    push(sampler, tiny_model(), 1)
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected
    with pytest.raises(RolloutError, match="no such sleep level"):
        asyncio.run(sampler.sleep(3))


def test_weights_arrive_across_dtypes():
    new = tiny_model(seed=1, scale=1.0)
    sampler = HFSampler(tiny_model(scale=1.0).to(torch.bfloat16))
    push(sampler, new, 1)
    assert torch.equal(sampler.model.lm_head.weight, new.lm_head.weight.to(torch.bfloat16))


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "gemma2"])
def test_parameters_of_a_trainer_in_the_process_become_the_samplers(family):
    trainer = tiny_model(family, seed=1, scale=2.0)
    sampler = HFSampler(tiny_model(family, scale=2.0), owns_model=True)
    alone = sampler.stats()["weight_bytes"]

    def share(version: int) -> None:
        chunks = chunk_weights(export_weights(trainer), 2000, version, is_live=True)
        asyncio.run(sampler.update_weights(chunks, version))

    share(1)
    pairs = list(zip(sampler.model.parameters(), trainer.parameters(), strict=True))
    assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)
    assert sampler.stats()["weight_bytes"] < alone, "what is the trainer's does not count"
    assert largest_difference(trainer, WANTED, sample(sampler, WANTED)) < 2e-5
    with torch.no_grad():
        trainer.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(RolloutError, match="has changed the weights that this sampler shares"):
        sample(sampler, WANTED)
    share(2)
    assert largest_difference(trainer, WANTED, sample(sampler, WANTED)) < 2e-5
    asyncio.run(sampler.sleep(2))
    assert all(theirs.untyped_storage().nbytes() > 0 for _, theirs in pairs), "they are not the sampler's to free"
    asyncio.run(sampler.wake())
    kept = trainer.get_input_embeddings().weight.clone()
    push(sampler, tiny_model(family, seed=2, scale=2.0), 3)
    assert trainer.get_input_embeddings().weight.equal(kept), "a copy goes into memory of the sampler's"
    assert largest_difference(tiny_model(family, seed=2, scale=2.0), WANTED, sample(sampler, WANTED)) < 2e-5


def test_parameters_of_another_type_are_copied():
    trainer, sampler = tiny_model(seed=1), HFSampler(tiny_model().to(torch.bfloat16), owns_model=True)
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(trainer), 2000, 1, is_live=True), 1))
    assert sampler.model.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        trainer.lm_head.weight.zero_()
    assert sampler.model.lm_head.weight.any() and sample(sampler, WANTED)


def test_sleep_frees_the_copies_that_products_read_until_the_next_pass():
    sampler = HFSampler(tiny_model(), owns_model=True)
    expected = [c.token_ids for c in sample(sampler, WANTED)]
    awake = sampler.stats()["weight_bytes"]
    asyncio.run(sampler.sleep())
    assert sampler.stats()["weight_bytes"] < awake
    asyncio.run(sampler.wake())
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected
    assert sampler.stats()["weight_bytes"] == awake
