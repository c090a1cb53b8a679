from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.errors import ModelError
from verl.models import export_weights, hf_folder, load_causal_lm


@pytest.fixture(scope="module")
def model(qwen2):
    return load_causal_lm(str(qwen2))


def save(target, model, **settings):
    return hf_folder.save_hf_folder(target, config=model.config, weights=export_weights(model), **settings)


def assert_same_weights(folder, model):
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))


def test_the_folder_is_complete(model, qwen2, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(qwen2)
    save(tmp_path / "out", model, tokenizer=tokenizer, generation_config=model.generation_config)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert_same_weights(tmp_path / "out", model)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.eos_token_id


def test_large_models_are_cut_into_shards_that_load(model, tmp_path):
    save(tmp_path / "out", model, max_shard_bytes=20_000)
    shards = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert_same_weights(tmp_path / "out", model)
    assert set(hf_folder.read_weights(tmp_path / "out")) == {name for name, _ in export_weights(model)}


def test_saving_again_with_fewer_shards_leaves_no_stale_one(model, tmp_path):
    save(tmp_path / "out", model, max_shard_bytes=20_000)
    save(tmp_path / "out", model)
    assert [p.name for p in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_the_configuration_says_in_which_dtype_the_weights_are(model, tmp_path):
    pairs = [(name, tensor.to(torch.bfloat16)) for name, tensor in export_weights(model)]
    hf_folder.save_hf_folder(tmp_path / "out", config=model.config, weights=pairs)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert model.config.dtype == torch.float32


def test_a_folder_without_weights_holds_the_rest(model, tmp_path):
    hf_folder.save_hf_folder(tmp_path / "out", config=model.config, weights=None)
    assert (tmp_path / "out" / "config.json").is_file()
    with pytest.raises(ModelError, match=r"no safetensors"):
        hf_folder.read_weights(tmp_path / "out")


def test_the_code_of_a_remote_code_model_travels_along(model, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "modeling_mine.py").write_text("x = 1\n")
    save(tmp_path / "out", model, source=tmp_path / "source")
    assert (tmp_path / "out" / "modeling_mine.py").read_text() == "x = 1\n"
