"""LoRA adapters in vLLM: the factors alone are sent, and its log-probs are those of the trainer."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.engines_real.vllm.test_in_process import PROMPTS, TOLERANCE, as_batch, difference, update
from tests.harness.engines import make_engine
from tests.harness.samplers import requests, sample
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, HFModelConfig, RolloutConfig
from verl.errors import RolloutError
from verl.rollout.vllm.sampler import VLLMSampler

LORA = {"lora_rank": 4, "lora_alpha": 8}
WANTED = requests(PROMPTS, samples=2, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def sampler(folder):
    rollout = RolloutConfig(name="vllm", prompt_length=128, response_length=128, max_num_seqs=16)
    made = VLLMSampler.from_config(rollout, HFModelConfig(path=str(folder), **LORA))
    yield made
    made.close()


def trained(engine, batch, steps):
    for _ in range(steps):
        engine.train_batch(batch, PPOPolicyLoss(ActorConfig()), temperature=1.0)
    return engine


def test_log_probs_are_the_trainer_s_after_each_adapter_and_not_before_it(sampler, folder):
    engine = make_engine(folder, model=LORA)
    update(sampler, engine.export_adapter(), version=1)
    found = sample(sampler, WANTED)
    assert difference(engine, WANTED, found) < TOLERANCE, "an adapter that changes nothing yet"
    batch = as_batch(WANTED, found)
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"]
    batch.tensors["advantages"] = batch.tensors["response_mask"] * torch.tensor([1.0, -1.0] * len(PROMPTS))[:, None]
    for version, steps in ((2, 3), (3, 1)):
        trained(engine, batch, steps)
        assert difference(engine, WANTED, sample(sampler, WANTED)) > 1e-3
        update(sampler, engine.export_adapter(), version)
        found = sample(sampler, WANTED)
        assert difference(engine, WANTED, found) < TOLERANCE
        assert {v for done in found for v in done.token_versions} == {version}
        assert sampler.engine._engine.list_loras() == {version}, "the one before is gone"


def test_an_adapter_that_is_not_whole_stops_the_sampler_until_one_is(sampler, folder):
    factors = list(make_engine(folder, model=LORA).export_adapter())
    update(sampler, factors, version=4)
    with pytest.raises(RolloutError, match="did not arrive"):
        update(sampler, factors[:-1], version=5)
    with pytest.raises(RolloutError, match="send them again"):
        sample(sampler, WANTED[:1])
    update(sampler, factors, version=6)
    assert asyncio.run(sampler.generate(WANTED[0])).token_versions[0] == 6
