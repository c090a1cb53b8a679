"""Model folders with files that do not belong to the model, or are not what their names say."""

from __future__ import annotations

import json
import pickle
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness.models import tiny_model_dir
from verl.errors import ModelError
from verl.metrics import notices
from verl.models import hf_folder, load_causal_lm, load_value_model
from verl.models.config import load_model_config
from verl.models.hf_folder import read_weights
from verl.models.merging import merge, merge_shards
from verl.models.slices import SlicedFolder

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    return tiny_model_dir(tmp_path / "model", layers=1)


def cut(folder):
    """The same model in shards with an index; the number of shards."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    hf_folder.save_hf_folder(
        folder, config=load_model_config(str(folder)), weights=iter(weights.items()), max_shard_bytes=20_000
    )
    return len(list(folder.glob("model-*.safetensors")))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_nothing_names_replaces_no_weight(folder, sharded):
    if sharded:
        assert cut(folder) > 1
    sound = read_weights(folder)
    save_file({NORM: torch.full((32,), 7.0)}, folder / "model-99999.safetensors")
    assert torch.equal(read_weights(folder)[NORM], sound[NORM])
    with SlicedFolder.opened(folder) as sliced:
        assert torch.equal(sliced.whole(NORM), sound[NORM])
    assert torch.equal(read_weights(merge(folder, folder.parent / "merged"))[NORM], sound[NORM])
    load_causal_lm(str(folder))
    assert "model-99999.safetensors is not read" in notices()[f"model {folder}"]


def test_a_weight_in_two_shards_is_refused(folder):
    cut(folder)
    shards = sorted(folder.glob("model-*.safetensors"))
    holder = next(shard for shard in shards if NORM in load_file(shard))
    other = next(shard for shard in shards if shard != holder)
    save_file({**load_file(other), NORM: torch.ones(32)}, other)
    with pytest.raises(ModelError, match=rf"two files of this folder hold the weight {NORM}"):
        read_weights(folder)
    with pytest.raises(ModelError, match="two files"), SlicedFolder.opened(folder):
        pass


@pytest.mark.parametrize("name", ["../evil.safetensors", "/tmp/evil.safetensors", 7])
def test_an_index_names_files_of_its_folder_alone(folder, name):
    cut(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][NORM] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder.parent / "evil.safetensors").write_bytes(b"")
    for load in (read_weights, load_causal_lm, load_value_model):
        with pytest.raises(ModelError, match=r"no file of the folder itself|index.json cannot be read"):
            load(str(folder))


def test_an_adapter_beside_the_weights_of_a_model_is_refused(folder):
    """transformers would apply it without a word."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}')
    with pytest.raises(ModelError, match=r"weights of a model and a LoRA adapter.*lora_adapter_path"):
        load_causal_lm(str(folder))


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_weights_that_are_cut_off_name_the_repair(folder, left):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:left])
    for load in (read_weights, load_causal_lm):
        with pytest.raises(ModelError, match=r"cut off or damaged.*model.safetensors.*Copy or download it again"):
            load(str(folder))


class Bad:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    "content", [pickle.dumps({"w": Bad()}, 2), b"not a pickle", b""], ids=["call", "text", "empty"]
)
def test_a_pickle_of_weights_that_holds_more_than_tensors_is_refused_in_a_sentence(folder, capsys, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_causal_lm(str(folder))
    assert "ran" not in capsys.readouterr().out
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert "not loaded" in str(caught.value) or "cannot be loaded" in str(caught.value)


def test_a_pickle_in_the_form_of_torch_is_refused_in_a_sentence(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"w": Bad()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds more than tensors.*save_pretrained"):
        load_causal_lm(str(folder))


ODD = {
    "deep": lambda config: "[" * 100_000,
    "deep inside": lambda config: json.dumps({**config, "x": 1})[:-1] + ', "y": ' + "[" * 3000 + "]" * 3000 + "}",
    "a list": lambda config: "[1]",
    "a word for a number": lambda config: json.dumps({**config, "hidden_size": "wide"}),
    "a list for a number": lambda config: json.dumps({**config, "num_attention_heads": [4]}),
    "nothing for a number": lambda config: json.dumps({**config, "num_attention_heads": None}),
    "zero heads": lambda config: json.dumps({**config, "num_attention_heads": 0}),
    "negative": lambda config: json.dumps({**config, "vocab_size": -3}),
    "rope of a word": lambda config: json.dumps({**config, "rope_parameters": "big"}),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_config_is_refused_in_a_sentence(folder, kind):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(ODD[kind](config))
    with pytest.raises(ModelError):
        load_causal_lm(str(folder))


@pytest.mark.parametrize("size", [99_999_999, 10**60])
def test_an_absurd_number_of_shards_costs_neither_memory_nor_time(tmp_path, size):
    (tmp_path / f"model_world_size_{size}_rank_0.pt").write_bytes(b"")
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"not complete.*ranks \[0\]"):
        merge_shards(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_shards_of_two_runs_are_told_apart(tmp_path):
    for name in ("model_world_size_1_rank_0.pt", "model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"not complete.*written by one run"):
        merge_shards(tmp_path)
