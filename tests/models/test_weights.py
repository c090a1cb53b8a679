from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.models import tiny_model_dir
from verl.errors import ModelError
from verl.models import count_parameters, export_weights, load_causal_lm, load_weights
from verl.models.weights import named_tensors, names_in_memory, names_on_disk

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "qwen3_moe"])
def test_exported_names_are_those_of_the_file_on_disk(tmp_path, family):
    path = tiny_model_dir(tmp_path, family, **(MIXTURE if family == "qwen3_moe" else {}))
    on_disk = load_file(path / "model.safetensors")
    exported = dict(export_weights(load_causal_lm(str(path))))
    assert set(exported) == set(on_disk)
    assert all(torch.equal(exported[name], tensor) for name, tensor in on_disk.items())


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_what_was_exported_loads_into_another_model(tmp_path, family):
    settings = MIXTURE if family == "qwen3_moe" else {}
    source, target = (
        load_causal_lm(str(tiny_model_dir(tmp_path / str(seed), family, seed=seed, **settings))) for seed in (0, 1)
    )
    load_weights(target, {name: tensor.clone() for name, tensor in export_weights(source)})
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters()))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_one_layer_alone_has_the_same_names_and_values_on_disk(tmp_path, family):
    model = load_causal_lm(str(tiny_model_dir(tmp_path, family, **(MIXTURE if family == "qwen3_moe" else {}))))
    whole = dict(export_weights(model))
    layer = {name: tensor for name, tensor in named_tensors(model).items() if name.startswith("model.layers.1.")}
    found = names_on_disk(model, layer)
    assert set(found) == {name for name in whole if name.startswith("model.layers.1.")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_model_without_values_names_real_weights_and_those_without_values_alike(tmp_path, family):
    path = tiny_model_dir(tmp_path, family, **(MIXTURE if family == "qwen3_moe" else {}))
    model, empty = load_causal_lm(str(path)), load_causal_lm(str(path), device="meta")
    assert all(p.is_meta for p in empty.parameters())
    weights = dict(export_weights(model))
    found = names_in_memory(empty, weights)
    assert all(torch.equal(found[name], tensor) for name, tensor in named_tensors(model).items())
    shapes = names_in_memory(empty, {name: tensor.to("meta") for name, tensor in weights.items()})
    assert list(shapes) == list(found) and all(shapes[name].shape == found[name].shape for name in found)


def test_a_missing_weight_is_an_error_that_names_it_and_nothing_is_loaded(tmp_path):
    model = load_causal_lm(str(tiny_model_dir(tmp_path)))
    weights = {name: tensor + 1 for name, tensor in export_weights(model)}
    del weights["model.norm.weight"]
    before = model.model.norm.weight.clone(), model.lm_head.weight.clone()
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load_weights(model, weights)
    assert torch.equal(model.model.norm.weight, before[0]) and torch.equal(model.lm_head.weight, before[1])


def test_an_unknown_weight_is_an_error(tmp_path):
    model = load_causal_lm(str(tiny_model_dir(tmp_path)))
    weights = {**dict(export_weights(model)), "model.nrm.weight": torch.ones(1)}
    with pytest.raises(ModelError, match=r"no weight model\.nrm\.weight"):
        load_weights(model, weights)


def test_tied_parameters_count_once(tmp_path):
    tied, untied = (
        count_parameters(load_causal_lm(str(tiny_model_dir(tmp_path / str(tie), tie_word_embeddings=tie))))
        for tie in (True, False)
    )
    assert untied - tied == 259 * 32
