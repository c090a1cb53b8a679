"""What supervised training learns of a row: three turns under a system message, token by token, for every template."""

from __future__ import annotations

import re

import pytest

from tests.harness.families import FAMILIES, family_template
from tests.harness.rows import write_prompts
from verl.config import SFTDataConfig
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import DataError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "5 it is"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2\n\nBecause I said so."},
]
LONG = "2\n\nBecause I said so."
# By hand: every second piece, from the second on, is learned.
EXPECTED = {
    "qwen2.5": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n",
        "5 it is<|im_end|>",
        "\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        f"{LONG}<|im_end|>",
        "\n",
    ],
    "qwen3": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        "2<|im_end|>",
        "\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n",
        "5 it is<|im_end|>",
        "\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        f"<think>\n\n</think>\n\n{LONG}<|im_end|>",
        "\n",
    ],
    "llama-3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "2<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nand 3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "5 it is<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        f"{LONG}<|eot_id|>",
        "",
    ],
    "gemma": [
        "<start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        "2<end_of_turn>",
        "\n<start_of_turn>user\nand 3?<end_of_turn>\n<start_of_turn>model\n",
        "5 it is<end_of_turn>",
        "\n<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        f"{LONG}<end_of_turn>",
        "\n",
    ],
    "mistral": [
        "<s>Be brief.\n\n[INST] 1+1? [/INST]",
        " 2</s>",
        "[INST] and 3? [/INST]",
        " 5 it is</s>",
        "[INST] 1+1? [/INST]",
        f" {LONG}</s>",
        "",
    ],
    "kimi-k2": [
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>1+1?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        "2<|im_end|>",
        "<|im_user|>user<|im_middle|>and 3?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "5 it is<|im_end|>",
        "<|im_user|>user<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        f"{LONG}<|im_end|>",
        "",
    ],
}
SIGNS = re.compile(r"<\|?[a-zA-Z_]+\|?>|</[a-z_]+>|\[/?INST\]")
# Ordinary text in the families' own tokenizers; that of Qwen2.5 has no single ids for the answers of tools.
PROSE = {"<tools>", "</tools>", "<name>"}
PROSE_OF = {"qwen2.5": {"<tool_response>", "</tool_response>"}}


def dataset(tmp_path, tokenizer, messages, **settings):
    path = write_prompts(tmp_path / "sft.parquet", [{"messages": messages}])
    return MultiTurnSFTDataset(path, tokenizer, SFTDataConfig(**settings))


def test_every_template_that_there_is_has_its_expectation(shared):
    stored = {path.stem for path in (shared / "data" / "chat_templates").glob("*.jinja")}
    assert {family.file for family in FAMILIES.values()} == stored and set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_sign_of_a_template_is_one_id_of_its_tokenizer(family, shared, name):
    signs = set(SIGNS.findall(family_template(shared, name))) - PROSE - PROSE_OF.get(name, set())
    tokenizer = family(name)
    assert signs and all(len(tokenizer(sign, add_special_tokens=False)["input_ids"]) == 1 for sign in signs)


@pytest.mark.parametrize("name", EXPECTED)
def test_three_turns_under_a_system_message_are_learned_token_by_token(tmp_path, family, name):
    tokenizer = family(name)
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in EXPECTED[name]]
    row = dataset(tmp_path, tokenizer, MESSAGES)[0]
    assert row["input_ids"].tolist() == [token for piece in pieces for token in piece]
    assert row["loss_mask"].tolist() == [number % 2 for number, piece in enumerate(pieces) for _ in piece]
    assert row["attention_mask"].all() and row["position_ids"].tolist() == list(range(len(row["input_ids"])))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_without_an_assistants_turn_names_file_row_and_what_is_missing(tmp_path, family, name):
    with pytest.raises(
        DataError, match=r"sft\.parquet, row 0, column 'messages': the conversation has no assistant message"
    ):
        dataset(tmp_path, family(name), MESSAGES[:2])
