"""vLLM over two processes (tensor parallel): the weights go through shared memory and arrive in both shards."""

from __future__ import annotations

import asyncio

import pytest

from verl.rollout import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights


def test_two_shards_sample_what_one_process_samples_before_and_after_new_weights(folder):
    arguments = {"model": str(folder), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}
    sampler = VLLMSampler({**arguments, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"})
    reference = HFSampler(str(folder), device="cpu")
    request = Request("a", (40, 41, 42), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    weights = [(name, value * 1.1) for name, value in reference.model.state_dict().items()]

    async def run():
        pairs = [(await sampler.generate(request), await reference.generate(request))]
        for receiver in (sampler, reference):
            await receiver.update_weights(chunk_weights(weights, 1 << 14, 2), 2)
        return [*pairs, (await sampler.generate(request), await reference.generate(request))]

    try:
        (before, expected_before), (after, expected_after) = asyncio.run(run())
    finally:
        sampler.close()
    for found, expected in ((before, expected_before), (after, expected_after)):
        assert found.token_ids == expected.token_ids
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    assert before.log_probs != after.log_probs
