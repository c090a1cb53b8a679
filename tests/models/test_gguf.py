"""GGUF files become folders of the same model; what cannot become one is refused before a weight is read."""

from __future__ import annotations

import gguf
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.models import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, tiny_model_dir, tiny_tokenizer
from verl.errors import MissingDependencyError, ModelError
from verl.models import gguf as gguf_files
from verl.models.folder import resolve_model
from verl.trainer.export import main

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def named(name: str) -> str:
    """llama.cpp's name of a weight of transformers' Qwen2."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[part]}.{kind}"


def in_8_bits(weight: np.ndarray) -> np.ndarray:
    """What Q8_0 keeps: per 32 values a scale in float16, and integers of up to 127."""
    blocks = weight.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    return (np.round(blocks / scale) * scale.astype(np.float16).astype(np.float32)).reshape(weight.shape)


def write(path, model, architecture: str = "qwen2", parts: int = 1) -> None:
    """The model as a GGUF file: floats, and the last projections of the MLPs in 8 bits."""
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    tokens = [*tokenizer.convert_ids_to_tokens(range(VOCAB_SIZE)), "ab"]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    for name, weight in model.state_dict().items():
        values, kind = weight.numpy(), gguf.GGMLQuantizationType.F32
        if "down_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(named(name), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model(tmp_path):
    folder = tiny_model_dir(tmp_path / "original", vocab=VOCAB_SIZE + 1, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_folder_of_a_gguf_file_holds_the_same_model(tmp_path, model, capsys):
    write(tmp_path / "small.gguf", model)
    assert main(["merge", "--local_dir", str(tmp_path / "small.gguf"), "--target_dir", str(tmp_path / "out")]) == 0
    assert f"wrote {tmp_path / 'out'}" in capsys.readouterr().out
    for name, weight in model.named_parameters():
        if "down_proj" in name:
            weight.data = torch.from_numpy(in_8_bits(weight.detach().numpy()))
    tokens = torch.tensor([[5, 77, 130, 259, 8]])
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|im_start|>user\ncab<|im_end|>\n<|im_start|>assistant\n"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "cab"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == text and tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert VOCAB_SIZE in tokenizer(text)["input_ids"] and tokenizer.eos_token == "<|im_end|>"


def test_a_gguf_file_as_the_path_of_a_model_names_the_command_that_converts_it(tmp_path):
    (tmp_path / "small model.gguf").touch()
    with pytest.raises(
        ModelError, match=r"python -m verl.model_merger merge --local_dir '.*small model.gguf' --target"
    ):
        resolve_model(tmp_path / "small model.gguf")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("text", "this is no complete GGUF file"),
        ("cut", "this is no complete GGUF file"),
        ("architecture", "cannot read the GGUF files of the architecture 'novel'"),
        ("parts", "this is one of 3 files that hold the model together"),
        ("memory", r"its 35,360 weights take 0.0 GB of memory in float32, 0.0 are free"),
        ("disk", r"weights take 0.0 GB of disk"),
    ],
)
def test_a_file_that_cannot_become_a_model_is_refused_before_it_is_read(tmp_path, monkeypatch, model, broken, said):
    file = tmp_path / "small.gguf"
    write(file, model, "novel" if broken == "architecture" else "qwen2", 3 if broken == "parts" else 1)
    if broken == "text":
        file.write_text("not a model" * 100)
    if broken == "cut":
        file.write_bytes(file.read_bytes()[:-5000])
    if broken == "memory":
        monkeypatch.setattr(psutil, "virtual_memory", Free)
    if broken == "disk":
        monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _: Free())
    with pytest.raises(ModelError, match=said):
        gguf_files.write_folder(file, tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


class Free:
    available = free = 1000


def test_without_the_package_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_files, "is_gguf_available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[gguf\]'"):
        gguf_files.write_folder(tmp_path / "small.gguf", tmp_path / "out")
