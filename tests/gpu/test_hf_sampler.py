"""The `hf` sampler on a GPU: plain forward passes, graphs against eager steps, sleep, updates."""

from __future__ import annotations

import asyncio
import copy
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from tests.harness.samplers import prompt, requests, sample, tiny_model
from verl.models import export_weights
from verl.rollout import Completion, Request
from verl.rollout.hf.replay import Replay
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import chunk_weights

WANTED = requests(
    [prompt(n, n) for n in (1, 9, 63, 64, 65, 130)], samples=3, max_tokens=[4, 100, 13, 1], temperature=0.7
)
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


def model_of(family: str, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> PreTrainedModel:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tiny_model(family, scale=scale, **shape).to("cuda", dtype)


def sampler_of(model: PreTrainedModel, **arguments: Any) -> HFSampler:
    sampler = HFSampler(copy.deepcopy(model), owns_model=True, **arguments)
    wants = not arguments.get("enforce_eager", False)
    assert (sampler._runner.policy.record_after is not None) == wants, "a notice says why"
    return sampler


def difference(model: PreTrainedModel, wanted: list[Request], found: list[Completion]) -> float:
    worst = 0.0
    for request, completion in zip(wanted, found):
        ids = torch.tensor([[*request.token_ids, *completion.token_ids]], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1].float()
        logs = (logits / request.sampling.temperature).log_softmax(-1)
        expected = logs.gather(-1, ids[0, len(request.token_ids) :, None])[:, 0].cpu()
        worst = max(worst, (expected - torch.tensor(completion.log_probs)).abs().max().item())
    return worst


def test_log_probs_equal_a_plain_forward_pass_in_float32() -> None:
    for family in FAMILIES:
        model = model_of(family)
        assert difference(model, WANTED, sample(sampler_of(model), WANTED)) < 1e-4, family


def test_bfloat16_log_probs_are_close() -> None:
    for family in FAMILIES:
        model = model_of(family, torch.bfloat16, scale=1.0)
        assert difference(model, WANTED, sample(sampler_of(model), WANTED)) < 0.06, family


def test_graphs_and_plain_operations_draw_the_same_tokens() -> None:
    model = model_of("qwen3")
    recorded, record = [], Replay._record
    with mock.patch.object(Replay, "_record", lambda self: recorded.append(self) or record(self)):
        expected = [c.token_ids for c in sample(sampler_of(model), WANTED)]
    assert recorded and all(replay.is_recorded for replay in recorded)
    eager = sampler_of(model, enforce_eager=True)
    assert [c.token_ids for c in sample(eager, WANTED)] == expected
    few = sampler_of(model, max_num_seqs=3)
    assert [c.token_ids for c in sample(few, WANTED)] == expected


def test_new_weights_arrive_in_captured_graphs() -> None:
    old = model_of("qwen2")
    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    sampler = sampler_of(old)
    sample(sampler, WANTED)
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(new), 4000, 1), 1))
    assert difference(new, WANTED, sample(sampler, WANTED)) < 1e-4


def test_sleep_frees_the_cache_and_level_two_the_weights() -> None:
    model = model_of("qwen2")
    sampler = sampler_of(model, cache_bytes=256 << 20)
    expected = [c.token_ids for c in sample(sampler, WANTED)]
    pool = sampler.stats()["cache_bytes"]
    before, _ = torch.cuda.mem_get_info()
    asyncio.run(sampler.sleep())
    after, _ = torch.cuda.mem_get_info()
    assert after - before >= 0.8 * pool, (before, after, pool)
    asyncio.run(sampler.wake())
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected
    asyncio.run(sampler.sleep(2))
    asyncio.run(sampler.wake())
    asyncio.run(sampler.update_weights(chunk_weights(export_weights(model), 1 << 20, 1), 1))
    assert [c.token_ids for c in sample(sampler, WANTED)] == expected


def test_a_model_that_is_only_borrowed_samples_over_the_pool() -> None:
    model = model_of("gemma2")
    assert difference(model, WANTED, sample(HFSampler(model), WANTED)) < 1e-4
