"""Files of examples/models, shrunk in size only, train a step with the sampler that they name."""

from __future__ import annotations

import pytest

from tests.examples.test_models import config_of, model_of, train_shrunk
from tests.harness.models import tiny_model_dir

pytestmark = pytest.mark.slow
NAMES = (
    "qwen3-0.6b-grpo-1gpu", "llama3.2-1b-grpo-1gpu", "gemma3-1b-grpo-1gpu", "qwen3-8b-grpo-8gpu",
    "llama3.1-8b-grpo-16x8gpu", "qwen3-8b-grpo-8gpu-megatron",
)  # fmt: skip
"""Each family on one GPU, and each training engine on several; Gemma 3 with a vision tower needs torchvision."""
TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_shrunk_in_size_trains_a_step_with_vllm(name, workplace, own_ray_folder):
    assert config_of(name).actor_rollout_ref.rollout.name == "vllm"
    tiny_model_dir("model", model_of(name)["model_type"], hidden=128, heads=4, kv_heads=2)  # heads of 32
    step = train_shrunk(name, {TENSOR: 1})
    assert step["training/rollout_probs_diff_max"] < 1e-2
