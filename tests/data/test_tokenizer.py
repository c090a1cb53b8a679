"""Tokenizers from folders and hub names, corrected for training, and clear errors where there is none."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.models import CHAT_TEMPLATE, tiny_tokenizer
from verl.data.chat_template import ChatTemplate
from verl.data.tokenizer import eos_token_ids, hf_tokenizer, normalize_token_ids
from verl.data.vision.processor import load_processor
from verl.errors import ModelError
from verl.metrics import notices


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_its_tokenizer_and_its_variables_are_expanded(folder, monkeypatch):
    monkeypatch.setenv("MODELS", str(folder.parent))
    tokenizer = hf_tokenizer("$MODELS/model")
    assert tokenizer("1+1", add_special_tokens=False)["input_ids"] == tiny_tokenizer()("1+1")["input_ids"]
    assert tokenizer.chat_template == CHAT_TEMPLATE and not notices()


def test_the_facades_give_the_same_functions():
    import verl.utils
    import verl.utils.tokenizer

    assert verl.utils.hf_tokenizer is verl.utils.tokenizer.hf_tokenizer is hf_tokenizer


def test_a_missing_pad_token_becomes_the_end_token_with_a_notice(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert hf_tokenizer(folder, correct_pad_token=False).pad_token_id is None
    found = hf_tokenizer(folder)
    assert found.pad_token == found.eos_token == "<|im_end|>"
    assert "tokenizer.pad_token" in notices()


def test_a_tokenizer_with_neither_pad_nor_end_token_is_refused(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="neither a padding nor an end-of-sequence token"):
        hf_tokenizer(folder)


def test_gemma_ends_its_turns_with_its_own_token(family, tmp_path):
    family("gemma").save_pretrained(tmp_path)
    assert hf_tokenizer(tmp_path).eos_token == "<end_of_turn>"
    assert hf_tokenizer(tmp_path, correct_gemma2=False).eos_token == "<eos>"


def test_a_custom_chat_template_is_text_or_a_file(folder, tmp_path):
    template = "{{ messages[0]['content'] }}"
    (tmp_path / "mine.jinja").write_text(template)
    for given in (template, str(tmp_path / "mine.jinja")):
        tokenizer = hf_tokenizer(folder, custom_chat_template=given)
        assert ChatTemplate(tokenizer).render([{"role": "user", "content": "hi"}]) == "hi"
    with pytest.raises(ModelError, match=r"^custom_chat_template: no such file.*Did you mean 'mine.jinja'"):
        hf_tokenizer(folder, custom_chat_template=str(tmp_path / "mime.jinja"))


def test_a_folder_without_tokenizer_files_names_what_is_missing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^name_or_path: .*tokenizer\.json .*is missing.*It has: config\.json"):
        hf_tokenizer(tmp_path)


def test_a_file_and_a_missing_folder_are_refused(tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "a.txt").touch()
    with pytest.raises(ModelError, match="this is a file; a model is a folder"):
        hf_tokenizer(tmp_path / "a.txt")
    with pytest.raises(ModelError, match=r"no such file or folder.*Did you mean 'qwen'"):
        hf_tokenizer(tmp_path / "qwem")


def test_a_damaged_tokenizer_file_is_a_model_error(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer could be loaded from this folder"):
        hf_tokenizer(folder)


def test_a_tokenizer_with_code_of_its_own_says_how_to_allow_it(folder):
    settings = folder / "tokenizer_config.json"
    auto = {"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}, "tokenizer_class": "Mine"}
    settings.write_text(json.dumps(auto))
    (folder / "tokenization_mine.py").write_text("raise RuntimeError('this code must not run')\n")
    with pytest.raises(ModelError, match=r"trust_remote_code=true in the model's section"):
        hf_tokenizer(folder)


@pytest.mark.parametrize("name", ["nobody-at-all/not-a-model", "not-a-model-at-all"])
def test_a_hub_name_that_cannot_be_reached_says_what_to_check(name):
    with pytest.raises(ModelError, match=r"from this hub name.*Check the name and the network") as caught:
        hf_tokenizer(name, key="actor_rollout_ref.model.path")
    assert caught.value.key == "actor_rollout_ref.model.path"


def test_a_text_model_has_no_processor(folder, shared):
    assert load_processor(folder) is None
    assert load_processor(shared / "models" / "tinystories-260k") is None


def test_a_model_folder_without_chat_template_says_what_to_set(folder):
    tokenizer = hf_tokenizer(folder)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"custom_chat_template: .*no chat template.*in the model\'s section"):
        ChatTemplate(tokenizer)


def test_token_ids_of_any_form_become_one_list(folder):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("1+1")["input_ids"]
    forms = [
        ids,
        tuple(ids),
        [ids],
        np.array(ids),
        torch.tensor(ids),
        torch.tensor([ids]),
        tokenizer("1+1"),
        tokenizer(["1+1"], return_tensors="pt"),
        tokenizer.backend_tokenizer.encode("1+1"),
        [tokenizer.backend_tokenizer.encode("1+1")],
        {"input_ids": ids},
    ]
    for form in forms:
        found = normalize_token_ids(form)
        assert found == ids and all(type(i) is int for i in found)
    assert normalize_token_ids([]) == []


@pytest.mark.parametrize("wrong", ["text", [[1], [2]], [1.5], None])
def test_what_is_not_one_sequence_of_ids_is_refused(wrong):
    with pytest.raises(ValueError, match="token ids of one sequence"):
        normalize_token_ids(wrong)


def test_all_stop_ids_are_named_once_the_tokenizers_own_first(tokenizer):
    eos = tokenizer.eos_token_id
    assert eos_token_ids(tokenizer) == (eos,)
    assert eos_token_ids(tokenizer, SimpleNamespace(eos_token_id=None)) == (eos,)
    assert eos_token_ids(tokenizer, SimpleNamespace(eos_token_id=0)) == (eos, 0)
    assert eos_token_ids(tokenizer, {"eos_token_id": [0, eos, 7]}) == (eos, 0, 7)
    assert eos_token_ids(SimpleNamespace(eos_token_id=None), {"eos_token_id": 5}) == (5,)
