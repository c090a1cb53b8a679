"""Folders of Megatron-Core's weights: what goes in comes out, whole and in slices, for every family of the table."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.converter_hf_to_mcore import main as converter
from tests.harness.models import tiny_model_dir
from tests.megatron.families import FAMILIES
from verl.errors import ModelError
from verl.metrics import notices, reset_notices
from verl.models import load_causal_lm, load_value_model
from verl.models.hf_folder import read_weights
from verl.models.megatron import FAMILIES as TABLE
from verl.models.megatron_conversion import convert_to_megatron, differences
from verl.models.merging import merge
from verl.models.slices import SlicedFolder
from verl.trainer.export import main as merger


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda given: given[0])
def folders(request, tmp_path_factory):
    name, family, config = request.param
    folder = tmp_path_factory.mktemp(name)
    model = tiny_model_dir(folder / "model", family, **config)
    return model, convert_to_megatron(model, folder / "converted")


def test_every_family_of_the_table_is_tried():
    assert {family for _, family, _ in FAMILIES} == set(TABLE)


def test_the_converted_folder_reads_as_the_model_that_went_in(folders):
    model, converted = folders
    assert differences(model, converted) == []
    expected = read_weights(model)
    with SlicedFolder.opened(converted) as weights:
        assert set(weights.names()) == set(expected)
        for name, whole in expected.items():
            assert weights.shape(name) == tuple(whole.shape)
            for axis, size in enumerate(whole.shape):
                low, high = size // 4, size // 4 + max(1, size // 2)
                found = weights.read(name, axis, low, high)
                assert torch.equal(found, whole.narrow(axis, low, high - low)), (name, axis)


def test_it_is_loaded_by_every_loader_and_merged_back_bit_for_bit(folders, tmp_path):
    model, converted = folders
    config = (model / "config.json").read_text()
    headless = "glm4_moe" in config or "gemma3_text" in config  # of which transformers has no value model
    for load in (load_causal_lm,) if headless else (load_causal_lm, load_value_model):
        ours, theirs = load(str(converted)).state_dict(), load(str(model)).state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    merged = read_weights(merge(converted, tmp_path / "merged"))
    expected = read_weights(model)
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in merged)


def test_heads_of_a_group_lie_together_and_gate_above_up(tmp_path):
    """2 groups of 2 queries, each head 8 rows: rows 0-15 are queries 0 and 1, 16-23 key 0, 24-31 value 0."""
    model = tiny_model_dir(tmp_path / "model", "llama")
    converted = load_file(convert_to_megatron(model, tmp_path / "converted") / "megatron-00000-00000.safetensors")
    weights = read_weights(model)
    fused = converted["decoder.layers.1.self_attention.linear_qkv.weight"]
    start = "model.layers.1."
    assert torch.equal(fused[:16], weights[f"{start}self_attn.q_proj.weight"][:16])
    assert torch.equal(fused[16:24], weights[f"{start}self_attn.k_proj.weight"][:8])
    assert torch.equal(fused[24:32], weights[f"{start}self_attn.v_proj.weight"][:8])
    assert torch.equal(fused[32:48], weights[f"{start}self_attn.q_proj.weight"][16:])
    gated = converted["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(gated[64:], weights[f"{start}mlp.up_proj.weight"])


def test_the_commands_convert_and_merge(tmp_path, capsys):
    model = str(tiny_model_dir(tmp_path / "model"))
    words = ["--hf_model_path", model, "--output_path", str(tmp_path / "converted"), "--test"]
    reset_notices()
    assert converter([*words, "--pp_size", "2"]) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    assert any("parallel sizes" in notice for notice in notices().values())
    merged = ["--local_dir", str(tmp_path / "converted"), "--target_dir", str(tmp_path / "merged")]
    assert merger(["test", "--backend", "megatron", *merged, "--test_hf_dir", model]) == 0
    assert converter(words) == 1 and "holds weights already" in capsys.readouterr().err


def test_weights_of_further_predictions_are_left_out_and_said(tmp_path):
    model = tiny_model_dir(tmp_path / "model", "llama")
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "model.layers.2.eh_proj.weight": torch.ones(2)}, model / "model.safetensors")
    reset_notices()
    converted = convert_to_megatron(model, tmp_path / "converted")
    assert any("model.layers.2.eh_proj.weight" in notice for notice in notices().values())
    assert len(differences(model, converted)) == 1
    save_file({**weights, "model.odd": torch.ones(2)}, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not know model\.odd"):
        convert_to_megatron(model, tmp_path / "other")


def test_a_folder_that_lacks_a_file_or_has_a_broken_manifest_is_told(tmp_path):
    model = tiny_model_dir(tmp_path / "model")
    converted = convert_to_megatron(model, tmp_path / "converted")
    manifest = json.loads((converted / "megatron.json").read_text())
    (converted / "megatron.json").write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(ModelError, match=r"another format.*9"):
        load_causal_lm(str(converted))
    (converted / "megatron.json").write_text("{")
    with pytest.raises(ModelError, match=r"megatron\.json cannot be read"):
        load_causal_lm(str(converted))
    (converted / "megatron.json").write_text(json.dumps(manifest))
    save_file({"other": torch.ones(1)}, converted / "megatron-00000-00000.safetensors")
    with pytest.raises(ModelError, match=r"no file of this folder holds embedding"):
        load_causal_lm(str(converted))


@pytest.mark.parametrize("place", ["dist_ckpt", "model/dist_ckpt"])
def test_a_checkpoint_of_megatrons_own_is_refused_with_what_to_do(tmp_path, place):
    (tmp_path / "actor" / place).mkdir(parents=True)
    with pytest.raises(ModelError, match=r"index is a pickle.*hf_model"):
        merge(tmp_path / "actor", tmp_path / "merged")
