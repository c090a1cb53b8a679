"""What was sampled is what is trained on: the sampler's log-probs are those of the training engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.harness.models import tiny_model_dir
from verl.agent_loop import AgentLoopOutput
from verl.agent_loop.batch import to_batch
from verl.config import FSDPEngineConfig, HFModelConfig
from verl.engines.plain import PlainEngine
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_sampler_and_trainer_are_equal_at_the_sampling_temperature(tmp_path, temperature):
    folder = tiny_model_dir(tmp_path)
    sampler = HFSampler(str(folder), dtype="float32", device="cpu", max_num_seqs=8)
    parameters = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=3)
    prompts = [(5, 6, 7, 8), (9, 10), (20, 21, 22, 23, 24, 25)]
    requests = [
        Request(f"{i}-{n}", prompt, parameters, uid=str(i), sample_index=n)
        for i, prompt in enumerate(prompts)
        for n in range(4)
    ]

    async def sample():
        return await asyncio.gather(*(sampler.generate(request) for request in requests))

    outputs = [
        AgentLoopOutput(
            prompt_ids=list(request.token_ids),
            response_ids=list(done.token_ids),
            response_mask=[1] * len(done.token_ids),
            response_logprobs=list(done.log_probs),
        )
        for request, done in zip(requests, asyncio.run(sample()))
    ]
    batch = to_batch(outputs, pad_token_id=0)
    engine = PlainEngine(HFModelConfig(path=str(folder)), FSDPEngineConfig(), seed=0)
    trained = engine.infer(batch, temperature=temperature)["log_probs"]
    torch.testing.assert_close(batch.tensors["rollout_log_probs"], trained, atol=2e-5, rtol=0)
    assert len({tuple(output.response_ids) for output in outputs}) > 6, "the samples of a prompt differ"
