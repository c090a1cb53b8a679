"""The `hf` sampler against plain forward passes: log-probs, independence of the batch, counters, ends, failures."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from tests.harness.samplers import (
    EOS,
    FAMILIES,
    largest_difference,
    prompt,
    reference_log_probs,
    renamed,
    requests,
    sample,
    tiny_model,
)
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.hf.pool_runner import PoolRunner
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.uniforms import stream_key, uniforms

LENGTHS = (1, 3, 9, 17, 26, 30, 31, 40)
MIXED = requests([prompt(n, n) for n in LENGTHS], samples=3, max_tokens=[4, 40, 23, 1, 31], temperature=0.7)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model):
    """The mixed requests, each on its own."""
    sampler = HFSampler(model)
    return [sample(sampler, [request])[0] for request in MIXED]


def tokens(completions) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_plain_forward_pass_of_every_family(family):
    model = tiny_model(family, scale=2.0)
    sampler = HFSampler(model)
    assert isinstance(sampler._runner, PoolRunner)
    found = sample(sampler, MIXED)
    assert largest_difference(model, MIXED, found) < 2e-5
    assert {c.finish_reason for c in found} == {"stop", "length"}


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 5},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"share_prompts": False},
        {"full_determinism": True},
    ],
)
def test_tokens_do_not_depend_on_what_else_is_in_the_batch(model, expected, limits):
    sampler = HFSampler(model, **limits)
    assert tokens(sample(sampler, MIXED)) == tokens(expected)
    assert tokens(sample(sampler, MIXED[::-1]))[::-1] == tokens(expected)


def test_full_determinism_is_bitwise_the_same_alone_and_together(model):
    sampler = HFSampler(model, full_determinism=True)
    together = sample(sampler, MIXED)
    crowded = sample(HFSampler(model, full_determinism=True, max_num_seqs=4), MIXED[::-1])[::-1]
    alone = [sample(sampler, [request])[0] for request in MIXED]
    assert together == crowded == alone


def test_tokens_are_the_inverse_cdf_of_the_numbers_of_their_key_and_position(model):
    request = Request(
        "x", prompt(6, 1), SamplingParams(max_tokens=12, seed=7, ignore_eos=True), uid="u", sample_index=2
    )
    found = sample(HFSampler(model, seed=100), [request])[0]
    import numpy as np

    numbers = uniforms(np.array([stream_key(107, "u", 2)], dtype=np.uint64), np.array([6]), 12)[0]
    cumulative = reference_log_probs(model, request, found).exp().double().cumsum(-1)
    wanted = [int((row <= number).sum()) for row, number in zip(cumulative, numbers)]
    assert list(found.token_ids) == wanted


def test_renormalised_log_probs_at_top_p_and_top_k(model):
    wanted = requests(
        [prompt(5, 2), prompt(26, 3)], samples=4, max_tokens=20, temperature=0.7, top_p=0.9, top_k=[-1, 8]
    )
    for request, completion in zip(wanted, sample(HFSampler(model), wanted)):
        logs = reference_log_probs(model, request, completion)
        for row, token, reported in zip(logs, completion.token_ids, completion.log_probs):
            ordered = row.sort(descending=True)
            probs = ordered.values.exp()
            if request.sampling.top_k > 0:
                probs[request.sampling.top_k :] = 0
                probs /= probs.sum()
            count = int((probs.cumsum(0) < 0.9).sum()) + 1
            kept = ordered.indices[:count].tolist()
            assert token in kept
            renormalised = row[token] - row[kept].logsumexp(0)
            assert reported == pytest.approx(renormalised.item(), abs=3e-5)


def test_greedy_takes_the_most_probable_token(model):
    wanted = requests([prompt(7, 4)], max_tokens=15, temperature=0.0, ignore_eos=True)
    found = sample(HFSampler(model), wanted)
    logs = reference_log_probs(model, wanted[0], found[0])
    assert list(found[0].token_ids) == logs.argmax(-1).tolist()
    assert largest_difference(model, wanted, found) < 2e-5
    ids = torch.tensor([wanted[0].token_ids])
    generated = model.generate(
        ids, do_sample=False, max_new_tokens=15, min_new_tokens=15, pad_token_id=0, eos_token_id=-1
    )
    assert list(found[0].token_ids) == generated[0, 7:].tolist()


def test_the_model_sees_each_distinct_prompt_once_and_every_response_token_but_the_last(model):
    seen = []
    hook = model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        sampler = HFSampler(model, max_num_seqs=7)
        seen.clear()
        found = sample(sampler, MIXED)
    finally:
        hook.remove()
    prompts = sum(LENGTHS)
    responses = sum(len(c.token_ids) - 1 for c in found)
    stats = sampler.stats()
    assert sum(seen) == prompts + responses == stats["forward_tokens"]
    assert (stats["prefill_tokens"], stats["decode_tokens"]) == (prompts, responses)
    assert stats["prompt_hits"] == len(MIXED) - len(LENGTHS) and stats["requests"] == len(MIXED)
    assert stats["response_tokens"] == responses + len(MIXED)


def test_the_language_model_head_runs_only_where_a_token_is_drawn(model):
    rows = []
    hook = model.lm_head.register_forward_hook(lambda m, args, out: rows.append(out.numel() // out.shape[-1]))
    try:
        sampler = HFSampler(model)
        rows.clear()
        sample(sampler, requests([prompt(20, 1), prompt(30, 2)], samples=4, max_tokens=3, ignore_eos=True))
    finally:
        hook.remove()
    assert rows == [2, 8, 8]


def test_a_response_ends_with_its_first_stop_token(model):
    plain = requests([prompt(4, 5)], samples=6, max_tokens=30, ignore_eos=True)
    unlimited = sample(HFSampler(model), plain)
    stops = (unlimited[0].token_ids[9], unlimited[1].token_ids[4])
    stopped = sample(
        HFSampler(model, stop_token_ids=[EOS]), requests([prompt(4, 5)], samples=6, max_tokens=30, stop_token_ids=stops)
    )
    for long, short in zip(unlimited, stopped):
        ends = [i for i, token in enumerate(long.token_ids) if token in (*stops, EOS)]
        assert short.token_ids == long.token_ids[: ends[0] + 1 if ends else None]
        assert short.finish_reason == ("stop" if ends else "length")
        assert len(short.log_probs) == len(short.token_versions) == len(short.token_ids)
    assert any(c.finish_reason == "stop" for c in stopped)


def test_end_tokens_come_from_the_generation_config_then_from_the_model():
    model = tiny_model()
    assert HFSampler(model).stop_token_ids == {EOS}
    model.generation_config.eos_token_id = [7, 9]
    assert HFSampler(model).stop_token_ids == {7, 9}
    assert HFSampler(model, stop_token_ids=()).stop_token_ids == frozenset()


def test_finished_rows_leave_and_waiting_ones_take_their_place(model):
    sampler = HFSampler(model, max_num_seqs=4)
    wanted = requests([prompt(3, n) for n in range(12)], max_tokens=[2, 20, 2, 2], ignore_eos=True)
    seen = []
    step = sampler._runner.step
    sampler._runner.step = lambda chunks: seen.append(len(sampler._runner.rows)) or step(chunks)
    assert len(sample(sampler, wanted)) == 12
    assert max(seen) <= 4
    # Three requests take 20 tokens, nine take 2. Three rows side by side need 20 steps; had the short ones waited for
    # the long ones of their batch, it would have been 3 x 20.
    assert sampler.stats()["steps"] < 30
    assert sampler.stats()["decode_tokens"] == 3 * 19 + 9 * 1


def test_long_and_short_responses_of_shared_prompts_survive_regrouping(model):
    wanted = requests(
        [prompt(33, n) for n in range(6)], samples=8, max_tokens=[1, 2, 90, 3, 17, 5, 60], ignore_eos=True
    )
    sampler = HFSampler(model)
    widths = set()
    step = sampler._runner.step

    def watched(chunks):
        found = step(chunks)
        widths.update((block.width, block.prefix_capacity > 0) for block in sampler._runner.blocks)
        return found

    sampler._runner.step = watched
    found = sample(sampler, wanted)
    assert largest_difference(model, wanted, found) < 4e-5
    assert {(8, True), (1, True)} <= widths, "groups of eight were split as they became sparse"
    assert sampler._runner.blocks == []


def test_an_interrupted_request_goes_on_as_if_there_had_been_no_interruption(model):
    whole = Request("a", prompt(8, 6), SamplingParams(max_tokens=20, ignore_eos=True), uid="u")
    sampler = HFSampler(model)
    full = sample(sampler, [whole])[0]
    rest = sample(sampler, [renamed(whole, generated_prefix=full.token_ids[:7])])[0]
    assert rest.token_ids == full.token_ids[7:]
    assert rest.log_probs == pytest.approx(full.log_probs[7:], abs=2e-5)


async def test_abort_returns_what_there_is():
    sampler = HFSampler(tiny_model(), max_num_seqs=2)
    wanted = requests([prompt(3, n) for n in range(4)], max_tokens=200, ignore_eos=True)

    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in wanted]
    for _ in range(10):
        await asyncio.sleep(0)
    assert await sampler.abort([wanted[0].id]) == 1
    assert await sampler.abort() == 3
    found = await asyncio.gather(*tasks)
    assert [c.finish_reason for c in found] == ["abort"] * 4
    assert len(found[0].token_ids) == len(found[0].log_probs) > 0
    assert found[2].token_ids == found[3].token_ids == (), "they had no slot yet"
    assert sampler._runner.rows == [] and sampler._scheduler.is_empty


async def test_cancelling_the_caller_frees_the_slot():
    sampler = HFSampler(tiny_model(), max_num_seqs=1)
    endless, short = requests([prompt(3, 0), prompt(3, 1)], max_tokens=[200, 3], ignore_eos=True)

    task = asyncio.ensure_future(sampler.generate(endless))
    waiting = asyncio.ensure_future(sampler.generate(short))
    for _ in range(6):
        await asyncio.sleep(0)
    task.cancel()
    found = await asyncio.wait_for(waiting, timeout=10)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(found.token_ids) == 3
    assert sampler.stats()["steps"] < 20


def test_a_sampler_serves_one_event_loop_after_another(model, expected):
    sampler = HFSampler(model)

    async def abandoned():
        task = asyncio.ensure_future(sampler.generate(MIXED[1]))
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(abandoned())
    assert tokens(sample(sampler, MIXED[:3])) == tokens(expected[:3])


def test_a_failing_step_gives_every_request_the_real_error_and_the_next_ones_work():
    model = tiny_model()
    sampler = HFSampler(model, max_num_seqs=2)
    wanted = requests([prompt(3, n) for n in range(3)], max_tokens=5)
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
    assert [type(x) for x in found[:2]] == [MemoryError, MemoryError]
    assert found[2].token_ids == sample(HFSampler(model), wanted[2:])[0].token_ids
    assert len(sample(sampler, wanted)) == 3


def test_logits_that_are_not_finite_are_an_error_and_leave_nothing_behind():
    model = tiny_model()
    sampler = HFSampler(model)
    wanted = requests([prompt(3, n) for n in range(3)], samples=2, max_tokens=6)
    good = sample(sampler, wanted)
    weight = model.model.layers[0].self_attn.v_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    with pytest.raises(RolloutError, match=r"logits are not finite.*NaN in training"):
        sample(sampler, wanted)
    with torch.no_grad():
        weight.copy_(before)
    assert tokens(sample(sampler, wanted)) == tokens(good)


def test_bad_requests_are_refused_and_others_are_unaffected(model):
    sampler = HFSampler(model, max_model_len=64)
    good = Request("good", prompt(4, 1), SamplingParams(max_tokens=4), uid="u")
    bad = [
        renamed(good, id="empty", token_ids=()),
        renamed(good, id="foreign", token_ids=(61,)),
        renamed(good, id="long", token_ids=prompt(61, 1)),
        renamed(good, id="picture", images=["x.png"]),
    ]

    async def run():
        return await asyncio.gather(*map(sampler.generate, [*bad, good]), return_exceptions=True)

    found = asyncio.run(run())
    assert [type(x) for x in found[:4]] == [RolloutError] * 4
    assert "takes no images, and the request has some" in str(found[3])
    assert len(found[4].token_ids) > 0
    with pytest.raises(RolloutError, match=r"max_model_len.*longer than the model's context.*1 to 256"):
        HFSampler(model, max_model_len=257)
    with pytest.raises(RolloutError, match="max_num_seqs"):
        HFSampler(model, max_num_seqs=300, max_num_batched_tokens=200)

    async def twice():
        return await asyncio.gather(sampler.generate(good), sampler.generate(good), return_exceptions=True)

    first, second = asyncio.run(twice())
    assert "id is in flight" in str(second) and first == found[4]


def test_a_borrowed_model_is_as_before_after_sampling():
    model = tiny_model()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    sample(HFSampler(model), MIXED[:4])
    assert model.training and model.config._attn_implementation == implementation
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loss = model(input_ids=torch.tensor([prompt(6, 1)]), labels=torch.tensor([prompt(6, 1)])).loss
    loss.backward()
    assert math.isfinite(loss.item())


def test_bfloat16_log_probs_are_close():
    model = tiny_model(scale=1.0).to(torch.bfloat16)
    found = sample(HFSampler(model), MIXED)
    assert largest_difference(model, MIXED, found) < 0.05


def test_a_model_folder_is_loaded_in_the_wanted_dtype(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    sampler = HFSampler(str(tmp_path), dtype="bfloat16")
    assert sampler.model.dtype == torch.bfloat16 and not sampler.model.training
    assert sampler.max_model_len == 256 and sampler.vocab_size == 61


def test_a_real_pretrained_llama_samples_what_it_would_score(shared):
    sampler = HFSampler(str(shared / "models" / "tinystories-260k"))
    wanted = requests([(1, 403, 407), (1, 300)], samples=8, max_tokens=60, temperature=0.7)
    found = sample(sampler, wanted)
    assert largest_difference(sampler.model, wanted, found) < 2e-5


def test_the_configuration_builds_a_sampler(tmp_path):
    from verl.config import HFModelConfig, RolloutConfig
    from verl.metrics import notices, reset_notices

    tiny_model().save_pretrained(tmp_path)
    reset_notices()
    model = HFModelConfig(path=str(tmp_path), override_config={"rms_norm_eps": 1e-5})
    rollout = RolloutConfig(
        max_num_seqs=3, max_model_len=100, full_determinism=True, prompt_length=64, response_length=36
    )
    sampler = HFSampler.from_config(rollout, model)
    assert sampler.model.dtype == torch.float32 and sampler.model.config.rms_norm_eps == 1e-5
    assert (sampler.max_model_len, sampler._scheduler.max_num_seqs) == (100, 3)
    assert sampler._runner.policy.exact and sampler._scheduler.share
    with pytest.raises(RolloutError, match=r"response_length: a prompt of 64 .*Allowed: 100 tok"):
        HFSampler.from_config(RolloutConfig(max_model_len=100, prompt_length=64, response_length=37), model)
    quiet = RolloutConfig(enable_prefix_caching=False, prompt_length=200, response_length=56, dtype="bfloat16")
    reset_notices()
    sampler = HFSampler.from_config(quiet, model)
    assert sampler.model.dtype == torch.bfloat16 and not sampler._scheduler.share and not notices()


def test_a_program_of_one_process_refuses_a_tensor_group():
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        HFSampler.from_config(RolloutConfig(tensor_model_parallel_size=2), HFModelConfig(path="nowhere"))
