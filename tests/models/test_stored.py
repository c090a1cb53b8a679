"""Weights read in parts from a folder's files, against the model that transformers loads whole."""

from __future__ import annotations

import random

import pytest

from tests.harness.models import tiny_model_dir
from verl.errors import ModelError
from verl.models import load_causal_lm, load_value_model
from verl.models.hollow import new_tensors
from verl.models.loading import HOLLOW, value_head
from verl.models.lora import LoraSettings, add_adapter
from verl.models.stored import StoredBlock, stored_weights
from verl.models.weights import WeightPlace, loose_tensors, named_tensors

FAMILIES = {
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_part_of_any_weight_is_that_of_the_whole_model(tmp_path, family):
    path = str(tiny_model_dir(tmp_path, family, **FAMILIES[family]))
    whole, drawn = named_tensors(load_causal_lm(path)), random.Random(0)
    with stored_weights(path, load_causal_lm(path, device=HOLLOW)) as stored:
        for name, tensor in whole.items():
            assert stored.shape(name) == tensor.shape
            for _ in range(4):
                bounds = [tuple(sorted(drawn.sample(range(length + 1), 2))) for length in tensor.shape]
                expected = tensor[tuple(slice(low, high) for low, high in bounds)]
                assert stored.box(name, bounds).equal(expected), (name, bounds)


def test_a_weight_of_a_file_is_found_as_a_block_of_one_in_memory():
    """Of (4, 6, 5): the second half of expert 2, turned around. It begins at 2 * 30 + 3 * 5."""
    block = StoredBlock.of("up", WeightPlace("fused", (5, 3), (1, 5), 75), (4, 6, 5))
    assert block == StoredBlock("up", (5, 3), start=(2, 3, 0), axes=(2, 1))
    assert block.shared([(0, 4), (4, 6), (1, 3)]) == ([(1, 3), (1, 3)], [(2, 3), (4, 6), (1, 3)])
    assert block.shared([(0, 2), (0, 6), (0, 5)]) is None
    assert StoredBlock.of("every second", WeightPlace("fused", (2, 30), (60, 1), 0), (4, 6, 5)) is None


def test_a_hollow_model_has_what_is_new_bit_for_bit_and_no_memory_for_the_rest(tmp_path):
    path, settings = str(tiny_model_dir(tmp_path)), LoraSettings(rank=2, target_modules=("q_proj",))
    whole, hollow = load_value_model(path, seed=4), load_value_model(path, seed=4, device=HOLLOW)
    for model in (whole, hollow):
        add_adapter(model, settings, seed=7, also=value_head(model))
    expected = {name: p.detach() for name, p in whole.named_parameters() if p.requires_grad}
    found = new_tensors(hollow)
    assert found.keys() == expected.keys() and len(found) == 2 * 2 + 2
    assert all(found[name].equal(expected[name]) for name in found)
    rest = [p for name, p in hollow.named_parameters() if name not in found]
    assert len(rest) > 10 and all(p.untyped_storage().nbytes() == p.element_size() for p in rest)
    buffers = {name: tensor for name, _, tensor in loose_tensors(whole)}
    assert buffers and all(tensor.equal(buffers[name]) for name, _, tensor in loose_tensors(hollow))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_hollow_tower_has_the_buffers_of_the_whole_one(seeing_model, family):
    path = str(seeing_model(family))
    loaded = {name: tensor for name, _, tensor in loose_tensors(load_causal_lm(path))}
    hollow = {name: tensor for name, _, tensor in loose_tensors(load_causal_lm(path, device=HOLLOW))}
    assert loaded.keys() == hollow.keys() and all(tensor.equal(hollow[name]) for name, tensor in loaded.items())


def test_what_cannot_be_read_in_parts_says_why(tmp_path):
    path = str(tiny_model_dir(tmp_path))
    hollow = load_causal_lm(path, device=HOLLOW)
    with pytest.raises(ModelError, match="not in a folder"), stored_weights("some/name", hollow):
        pass
    hollow.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ModelError, match="quantized"), stored_weights(path, hollow):
        pass
