"""Which models the pool serves, and that the others are served just as exactly through transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from tests.harness.samplers import largest_difference, prompt, requests, sample, tiny_model
from verl.errors import RolloutError
from verl.metrics import notices
from verl.rollout.hf.attention import UnsupportedModelError
from verl.rollout.hf.padded_runner import PaddedRunner
from verl.rollout.hf.pool_runner import PoolPolicy, PoolRunner
from verl.rollout.hf.probe import cache_shape, pool_runner
from verl.rollout.hf.sampler import HFSampler

WANTED = requests([prompt(n, n) for n in (1, 7, 12, 19)], samples=3, max_tokens=[3, 14, 1, 9], temperature=0.7)
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3_moe", MIXTURE),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 6}),
        ("cohere", {}),
        ("phi3", {"pad_token_id": 0}),
    ],
)
def test_families_of_transformers_need_no_code_of_their_own(family, config):
    model = tiny_model(family, scale=1.5, **config)
    sampler = HFSampler(model)
    assert isinstance(sampler._runner, PoolRunner)
    assert largest_difference(model, WANTED, sample(sampler, WANTED)) < 2e-5


def test_keys_and_values_may_have_different_dimensions():
    latent = {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    }  # fmt: skip
    model = tiny_model("deepseek_v3", scale=1.5, **latent)
    shape, _ = cache_shape(model, 256)
    assert (shape.num_layers, shape.num_heads, shape.key_dim, shape.value_dim) == (2, 4, 16, 12)
    assert largest_difference(model, WANTED, sample(HFSampler(model), WANTED)) < 2e-5


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention interface"),
        ("mamba", {}, "attention interface"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "sinks"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    ],
)
def test_other_models_fall_back_with_a_notice_and_the_same_numbers(family, config, reason):
    model = tiny_model(family, scale=1.5, **config)
    sampler = HFSampler(model, max_num_seqs=7)
    assert isinstance(sampler._runner, PaddedRunner)
    assert any(reason in text and "slower" in text for text in notices().values())
    found = sample(sampler, WANTED)
    assert largest_difference(model, WANTED, found) < 2e-5
    alone = [sample(sampler, [request])[0].token_ids for request in WANTED]
    assert [c.token_ids for c in found] == alone
    with pytest.raises(UnsupportedModelError):
        HFSampler(model, full_determinism=True)


def test_a_model_whose_logits_the_pool_does_not_reproduce_is_noticed():
    def skewed(module, query, key, value, mask, **kwargs):
        return 2 * value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register("skewed_for_test", skewed)
    model = tiny_model()
    model.config._attn_implementation = "skewed_for_test"
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        pool_runner(model, 256, PoolPolicy())


def test_a_window_that_the_attention_call_does_not_name_is_noticed():
    model = tiny_model("llama")
    model.config.sliding_window = 100
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        pool_runner(model, 256, PoolPolicy())
    assert pool_runner(model, 100, PoolPolicy()), "no sequence is longer than the window"


def test_a_model_that_no_runner_reproduces_is_refused():
    class Forgetful(type(tiny_model())):
        """Answers differently with a cache."""

        def forward(self, *args, use_cache=None, **kwargs):
            found = super().forward(*args, use_cache=use_cache, **kwargs)
            found.logits = found.logits + bool(use_cache) * torch.arange(61)
            return found

    model = tiny_model()
    model.__class__ = Forgetful
    with pytest.raises(RolloutError, match=r"cannot run Forgetful.*Use another engine"):
        HFSampler(model)


def test_sliding_windows_hold_in_prompts_computed_in_pieces():
    model = tiny_model("gemma2", scale=1.5)
    sampler = HFSampler(model, max_num_seqs=4, max_num_batched_tokens=9)
    wanted = requests([prompt(45, 1), prompt(33, 2)], samples=3, max_tokens=20, ignore_eos=True)
    assert largest_difference(model, wanted, sample(sampler, wanted)) < 2e-5
