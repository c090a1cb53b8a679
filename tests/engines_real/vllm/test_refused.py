"""What this build of vLLM cannot do is refused by name, before or at the latest when the first weights arrive."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.models import tiny_model_dir
from verl.errors import ConfigError, RolloutError
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights


def test_a_head_size_without_a_kernel_is_refused_before_the_engine_starts(tmp_path):
    with pytest.raises(RolloutError, match=r"attention heads of this width.*Got 8"):
        VLLMSampler({"model": str(tiny_model_dir(tmp_path)), "enforce_eager": True})


def test_fp8_without_a_kernel_is_refused_before_the_engine_starts(folder):
    with pytest.raises(RolloutError, match=r"no FP8 kernels.*torchao"):
        VLLMSampler({"model": str(folder), "quantization": "fp8", "dtype": "bfloat16", "enforce_eager": True})


def test_a_context_longer_than_the_models_is_refused_with_the_engines_reason(folder):
    with pytest.raises(RolloutError, match=r"did not start.*max_model_len"):
        VLLMSampler({"model": str(folder), "enforce_eager": True, "max_model_len": 100000})


def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest_name(folder):
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm.max_num_seq: vLLM has no such argument.*max_num_seqs"):
        VLLMSampler({"model": str(folder), "max_num_seq": 4})


def test_a_mixture_of_experts_whose_reload_moves_log_probs_is_refused(tmp_path):
    made = tiny_model_dir(
        tmp_path, "qwen3_moe", hidden=128, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32
    )
    sampler = VLLMSampler({"model": str(made), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4})
    weights = list(HFSampler(str(made), device="cpu").model.state_dict().items())
    try:
        with pytest.raises(RolloutError, match=r"cannot take new weights for this model.*moved log-probs by"):
            asyncio.run(sampler.update_weights(chunk_weights(weights, 1 << 20, 1), 1))
    finally:
        sampler.close()
