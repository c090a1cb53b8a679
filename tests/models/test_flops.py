"""Counts worked out by hand from the shapes of the matrices."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.models import ModelFlops, count_parameters, device_peak_flops

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# per layer: q 32x64, k and v 32x32 each, o 64x32; gate, up, down 32x48 each; head 32x100
DENSE = 2 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48) + 32 * 100


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "mistral", "gemma2"])
def test_dense_families_count_every_matrix_once(family):
    flops = ModelFlops.of(AutoConfig.for_model(family, **SMALL))
    assert flops.exact and flops.matmul_parameters == DENSE
    assert flops.attention_width == 64


def test_the_count_equals_the_matrices_of_the_real_model():
    config = AutoConfig.for_model("qwen2", **{**SMALL, "head_dim": 8, "tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert ModelFlops.of(config).matmul_parameters == matrices


def test_a_mixture_counts_the_router_and_the_chosen_experts():
    config = AutoConfig.for_model(
        "qwen3_moe", **SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    )
    attention = 32 * 64 + 2 * 32 * 32 + 64 * 32
    assert ModelFlops.of(config).matmul_parameters == 2 * (attention + 32 * 8 + 2 * 3 * 32 * 24) + 32 * 100


def test_training_costs_six_operations_per_parameter_and_twelve_per_layer_width_and_context():
    flops = ModelFlops(matmul_parameters=1000, attention_width=64, windows=(None, None))
    lengths = [10, 30]
    by_hand = sum(6 * 1000 * s + 12 * 2 * 64 * s * s for s in lengths)
    assert flops.train(lengths) == by_hand == 3 * flops.forward(lengths)


def test_a_sliding_window_limits_the_context():
    flops = ModelFlops(matmul_parameters=0, attention_width=1, windows=(None, 4))
    assert flops.forward([10]) == 4 * 10 * (10 + 4)


def test_an_unknown_family_is_counted_by_its_parameters_and_says_so():
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64)
    parameters = count_parameters(AutoModelForCausalLM.from_config(config))
    flops = ModelFlops.of(config, parameters)
    assert not flops.exact
    assert flops.matmul_parameters == parameters  # the tied embedding stands in for the head
    assert flops.windows == (None, None)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12)],
)
def test_peaks_of_known_devices(name, peak):
    assert device_peak_flops(name) == peak


def test_the_peak_of_another_device_is_unknown():
    assert device_peak_flops("Some CPU") is None


def test_latent_attention_and_its_experts_are_counted_by_hand():
    """DeepSeek-V3 in small: 2 layers (one dense), hidden 8, 2 heads."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        q_lora_rank=4, kv_lora_rank=3, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, intermediate_size=16,
        moe_intermediate_size=5, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    attention = (8 * 4 + 4 * 2 * 4) + 8 * (3 + 2) + 3 * 2 * (2 + 2) + 2 * 2 * 8
    mlp = 3 * 8 * 16 + (8 * 4 + 3 * 8 * 5 * 3)
    found = ModelFlops.of(config)
    assert found.exact and found.matmul_parameters == 2 * attention + mlp + 8 * 10
    assert found.forward([7]) == 2 * found.matmul_parameters * 7 + 2 * 2 * (2 * (2 + 2) + 2 * 2) * 7 * 7
