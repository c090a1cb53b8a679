"""Counts from a config.json against transformers' classes on the meta device."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from verl.errors import ModelError
from verl.models.shape import model_shape
from verl.planner.shapes import FAMILIES, ModelShape

TEXT = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 4, "head_dim": 8}  # fmt: skip
TOWER = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
MODELS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama, tied": {"tie_word_embeddings": True},
    "granite": {},
    "smollm3": {},
    "mistral": {},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8},
    "phi3": {},
    "olmo2": {},
    "olmo3": {},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1], "head_dim": 16},
    "glm4_moe": ROUTED | {"head_dim": 16, "use_qk_norm": True},
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "deepseek_v3, queries at full width": ROUTED | LATENT | {"q_lora_rank": None},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
}
VISION = {
    "qwen2_vl": TOWER | {"embed_dim": 32, "hidden_size": 64},
    "qwen2_5_vl": TOWER | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64},
    "qwen3_vl": TOWER
    | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 16}
    | {"deepstack_visual_indexes": [0, 1]},
    "gemma3": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"image_size": 16, "patch_size": 4},
}


def counted(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def text_config(name: str) -> AutoConfig:
    return AutoConfig.for_model(name.partition(",")[0], **TEXT | MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_a_text_model_are_those_of_its_class(name):
    config = text_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.parameters == counted(model)
    layers = [counted(layer) for layer in model.model.layers]
    assert [block.parameters for block in shape.blocks] == layers
    assert shape.embedding == counted(model.get_input_embeddings())


@pytest.mark.parametrize("name", VISION)
def test_parameters_of_a_vision_model_are_those_of_its_class(name, tmp_path):
    config = AutoConfig.for_model(name, text_config=TEXT, vision_config=VISION[name])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert model_shape(str(tmp_path), "path").parameters == counted(model)


def test_every_family_is_compared():
    compared = {name.partition(",")[0] for name in MODELS}
    text_of_vision = {f"{name}_text" for name in VISION if f"{name}_text" in FAMILIES}
    assert FAMILIES.keys() == compared | text_of_vision | VISION.keys()


def test_fields_that_a_raw_config_json_leaves_out_are_transformers_defaults(tmp_path):
    """The text part of gemma-3-4b-it names no heads, no vocabulary and no types of its layers."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896,
              "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
              "vision_use_head": False}  # fmt: skip
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
           "vision_config": vision}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = model_shape(str(tmp_path), "path")
    assert (shape.heads, shape.kv_heads) == (8, 4)
    # Four billion and the tower's 0.4; each sixth layer sees the whole context.
    assert 4.2e9 < shape.parameters < 4.4e9 and 0.40e9 < shape.vision < 0.43e9
    assert [block.window for block in shape.blocks[:6]] == [1024] * 5 + [None]


def test_a_model_without_files_here_is_refused_by_its_setting(tmp_path):
    with pytest.raises(ModelError, match=r"^critic\.model\.path: .*hf download") as error:
        model_shape(str(tmp_path), "critic.model.path")
    assert error.value.got == str(tmp_path)


def test_a_published_configuration_gives_the_published_sizes():
    """Qwen2.5-7B: 7.61 B parameters (6.53 B without embeddings) and 57,344 bytes of cache per token, its model card."""
    published = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    }
    shape = ModelShape.from_config(published)
    assert shape.parameters == 7_615_616_512
    assert round((shape.parameters - shape.embedding - shape.head) / 1e9, 2) == 6.53
    assert shape.cache_bytes(1) == 57_344
    # Matrices without the embedding, twice; scores and mixing over 1,000 tokens in 28 layers, twice each.
    layer = 2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944
    assert shape.flops_per_token(1000) == 2 * (28 * layer + 152064 * 3584) + 4 * 28 * 3584 * 1000


def test_a_windowed_layer_caches_no_more_than_its_window():
    shape = ModelShape.from_config(text_config("gemma3_text").to_dict())
    per_layer = 2 * 2 * 256 * 2  # keys and values, two heads of 256, two bytes
    assert shape.cache_bytes(100) == per_layer * (8 + 100 + 100)
    assert shape.cache_bytes(5) == per_layer * 15


def test_latent_attention_caches_compressed_values():
    shape = ModelShape.from_config(text_config("deepseek_v3").to_dict())
    assert shape.cache_bytes(1) == 3 * (16 + 8) * 2
    assert shape.kv_heads == 1  # each tensor-parallel rank holds all of it


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size"])
def test_a_missing_field_is_named(field):
    config = {name: value for name, value in (TEXT | {"model_type": "llama"}).items() if name != field}
    with pytest.raises(ModelError, match=f"^{field}: "):
        ModelShape.from_config(config)


def test_a_missing_field_of_a_part_is_named_with_its_section():
    with pytest.raises(ModelError, match=r"^text_config\.hidden_size: "):
        ModelShape.from_config({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})


def test_an_unknown_family_is_answered_with_near_ones():
    with pytest.raises(ModelError, match="Did you mean 'qwen3'"):
        ModelShape.from_config(TEXT | {"model_type": "qwen33"})


def test_a_list_of_layers_of_another_length_is_refused():
    config = TEXT | {"model_type": "qwen3", "layer_types": ["full_attention"] * 2}
    with pytest.raises(ModelError, match=r"^layer_types: .*Got 2.*Allowed: 3"):
        ModelShape.from_config(config)
