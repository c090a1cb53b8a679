from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.harness.models import tiny_model_dir
from verl.errors import ConfigError, ModelError
from verl.models import load_causal_lm, load_model_config, load_value_model
from verl.models.loading import value_head


@pytest.fixture
def copy(qwen2, tmp_path):
    return shutil.copytree(qwen2, tmp_path / "model")


def test_a_causal_model_loads_in_the_asked_dtype_with_sdpa(qwen2):
    model = load_causal_lm(str(qwen2), dtype="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "sdpa"


def test_the_override_chooses_the_attention_and_the_argument_wins(qwen2):
    override = {"attn_implementation": "eager"}
    assert load_causal_lm(str(qwen2), override_config=override).config._attn_implementation == "eager"
    assert load_causal_lm(str(qwen2), override_config=override, attn="sdpa").config._attn_implementation == "sdpa"


def test_a_family_with_soft_capping_falls_back_to_eager_attention(tmp_path):
    model = load_causal_lm(str(tiny_model_dir(tmp_path, "gemma2")))
    assert model.config._attn_implementation == "eager"


def test_loading_leaves_the_random_numbers_alone(qwen2):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load_value_model(str(qwen2), seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_own_aligned_memory_and_not_a_mapped_file(qwen2):
    model = load_causal_lm(str(qwen2))
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())


def test_tied_embeddings_stay_tied(tmp_path):
    model = load_causal_lm(str(tiny_model_dir(tmp_path, tie_word_embeddings=True)))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_new_value_head_is_small_seeded_and_centred(qwen2):
    first, same, other = (value_head(load_value_model(str(qwen2), seed=s)) for s in (1, 1, 2))
    assert first.weight.shape == (1, 32) and first.bias.item() == 0.0
    assert torch.equal(first.weight, same.weight) and not torch.equal(first.weight, other.weight)
    assert 0 < first.weight.std() < 3 / 33


def test_the_trunk_of_a_value_model_is_that_of_the_policy(qwen2):
    policy, value = load_causal_lm(str(qwen2)), load_value_model(str(qwen2))
    for name, tensor in policy.model.named_parameters():
        assert torch.equal(tensor, dict(value.model.named_parameters())[name])


def test_no_dropout_surrounds_the_value_head(qwen2):
    model = load_value_model(str(qwen2))
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize("auto", [AutoModelForTokenClassification, AutoModelForSequenceClassification])
def test_the_head_of_a_classifier_with_one_label_is_kept(qwen2, tmp_path, auto):
    classifier = auto.from_pretrained(qwen2, num_labels=1)
    classifier.save_pretrained(tmp_path / "reward")
    model = load_value_model(str(tmp_path / "reward"), seed=9)
    assert torch.equal(value_head(model).weight, classifier.score.weight)


def test_a_classifier_with_several_labels_is_refused(qwen2, tmp_path):
    AutoModelForTokenClassification.from_pretrained(qwen2, num_labels=3).save_pretrained(tmp_path / "labels")
    with pytest.raises(ModelError):
        load_value_model(str(tmp_path / "labels"))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "it has no config.json"),
        (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
        (lambda f: (f / "config.json").write_text("{"), "names no model_type"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights.*model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 40), "cut off or damaged"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00001.safetensors"}}'
            ),
            "shards that are not there: model-00001.safetensors",
        ),
        (lambda f: (f / "config.json").write_text('{"model_type": "qwen99"}'), "qwen99"),
    ],
)
def test_a_folder_that_is_not_a_model_is_an_error_that_says_what_is_missing(copy, break_it, message):
    break_it(copy)
    with pytest.raises(ModelError, match=message):
        load_causal_lm(str(copy))


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no such folder.*nothing_here"):
        load_causal_lm(str(tmp_path / "nothing_here"))


def test_a_file_is_not_a_model_folder(qwen2):
    with pytest.raises(ModelError, match=r"this is a file.*Try"):
        load_causal_lm(str(qwen2 / "config.json"))


def test_the_folder_above_a_model_names_the_model(qwen2):
    with pytest.raises(ModelError, match=r"Did you mean '.*qwen2'"):
        load_causal_lm(str(qwen2.parent))


def test_an_adapter_folder_is_told_apart(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"LoRA adapter.*lora_adapter_path"):
        load_causal_lm(str(tmp_path))


def test_weights_that_lack_a_tensor_are_an_error_and_not_random(copy):
    config = json.loads((copy / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks 12 tensors.*model.layers.2"):
        load_causal_lm(str(copy))


def test_overrides_reach_the_configuration(qwen2):
    config = load_model_config(
        str(qwen2), override_config={"attention_dropout": 0.25, "model_config": {"rope_theta": 5.0}}
    )
    assert config.attention_dropout == 0.25
    assert config.rope_parameters == {"rope_theta": 5.0, "rope_type": "default"}


def test_the_older_spelling_of_rope_scaling_takes_effect(qwen2):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope = load_model_config(str(qwen2), override_config={"rope_scaling": scaling}).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 4.0, 10000.0)


def test_an_unknown_override_is_an_error_with_the_nearest_name(qwen2):
    with pytest.raises(ConfigError, match=r"override_config.attention_droput.*Did you mean 'attention_dropout'"):
        load_model_config(str(qwen2), override_config={"attention_droput": 0.1})


def test_a_missing_external_library_is_named(qwen2):
    with pytest.raises(ConfigError, match=r"external_lib.*no_such_lib"):
        load_model_config(str(qwen2), external_lib="no_such_lib")


def test_an_external_library_is_imported_first(qwen2, tmp_path, monkeypatch):
    (tmp_path / "my_external_models.py").write_text("import sys\nsys.modules[__name__].imported = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_model_config(str(qwen2), external_lib="my_external_models")
    import my_external_models

    assert my_external_models.imported


def test_remote_code_is_not_run_unless_trusted(copy):
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "my_config.MyConfig"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "my_config.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(ModelError, match=r"trust_remote_code=true"):
        load_causal_lm(str(copy))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "_experts_implementation"])
def test_a_configuration_that_names_kernels_of_the_hub_fetches_none(copy, name):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {name: "somebody/kernels"}))
    with pytest.raises(ModelError, match=r"names code of the hub.*'somebody/kernels'"):
        load_causal_lm(str(copy))


def test_a_pretrained_llama_loads(shared):
    model = load_causal_lm(str(shared / "models" / "tinystories-260k"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(AutoModelForCausalLM.from_config(model.config), type(model))
