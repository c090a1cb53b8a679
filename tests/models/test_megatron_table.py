"""Settings that Megatron-Core training reads off a configuration, and models that its families do not cover."""

import pytest
from transformers import AutoConfig

from tests.megatron.families import LATENT, LLAMA3, YARN
from verl.errors import ConfigError, ModelError
from verl.models.megatron import local_rope_base, megatron_family, rope_settings, slots_of


def config(family, **fields):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4, "hidden_size": 32}
    named = {key: value for key, value in fields.items() if key != "kv_heads"}
    return AutoConfig.for_model(family, **{**heads, **named})


def settings(family, **fields):
    found = config(family, **fields)
    return megatron_family(found).settings(found)


def test_deepseek_is_dense_first_and_limits_experts_to_the_best_groups():
    found = settings("deepseek_v3", **LATENT)
    assert found["moe_layer_freq"] == [0, 1, 1, 1]
    assert (found["moe_router_num_groups"], found["moe_router_group_topk"]) == (4, 2)
    assert found["moe_shared_expert_intermediate_size"] == 32, "two experts of 16 are one of 32"
    assert (found["rope_type"], found["rotary_base"]) == ("rope", 10000.0)
    slots = {slot.ours: layers for slot, layers in slots_of(megatron_family(config("deepseek_v3", **LATENT)), found)}
    assert slots["decoder.layers.{layer}.mlp.linear_fc1.weight"] == (0,)
    assert slots["decoder.layers.{layer}.mlp.router.expert_bias"] == (1, 2, 3)


def test_groups_that_are_all_chosen_limit_nothing():
    assert "moe_router_num_groups" not in settings("deepseek_v3", **{**LATENT, "topk_group": 4})


def test_yarn_without_scales_means_the_usual_one():
    rope = {key: value for key, value in YARN.items() if not key.startswith("mscale")}
    found = settings("deepseek_v3", **LATENT, rope_parameters=rope)
    assert (found["mscale"], found["mscale_all_dim"]) == (1.0, 0.0)
    assert (found["rotary_scaling_factor"], found["original_max_position_embeddings"]) == (4.0, 8)


def test_positions_of_llama_3_are_scaled():
    found = rope_settings(config("llama", rope_parameters=LLAMA3))
    assert found == {"rotary_base": 10000.0, "rope_scaling": True, "rope_scaling_factor": 8.0}


@pytest.mark.parametrize(
    "family, fields, key",
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("gemma", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {**LATENT, "norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {**LATENT, "topk_group": 1}, "topk_group"),
        ("deepseek_v3", {**LATENT, "rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {**LATENT, "attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {**LATENT, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 0.0}}, "rope_parameters"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_a_family_does_not_cover_is_refused_by_name(family, fields, key):
    with pytest.raises(ConfigError, match=key):
        settings(family, **fields)


def test_layers_of_one_kind_have_a_rotary_base_of_their_own():
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    gemma = config("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters=ropes)
    assert rope_settings(gemma) == {"rotary_base": 1e6, "seq_len_interpolation_factor": 8.0}
    assert local_rope_base(gemma) == 1e4 and local_rope_base(config("llama")) is None
    ropes["sliding_attention"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match="default in layers with a sliding window"):
        local_rope_base(
            config("gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters=ropes)
        )


def test_other_scalings_and_families_are_refused():
    with pytest.raises(ConfigError, match="llama3 with"):
        rope_settings(config("llama", rope_parameters={**LLAMA3, "high_freq_factor": 2.0}))
    with pytest.raises(ModelError, match="no table of weights"):
        megatron_family(config("olmo2"))


@pytest.mark.parametrize(
    "family, why",
    [
        ("gpt_oss", "no sinks"),
        ("qwen3_next", "linear attention"),
    ],
)
def test_families_that_local_layers_cannot_be_are_refused_with_the_reason(family, why):
    with pytest.raises(ModelError, match=f"no table of weights.*{why}"):
        megatron_family(config(family))
