"""Conversations for supervised fine-tuning: forms, masks, lengths, padding, and what is wrong said with its row."""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler

import pytest

from tests.harness.rows import turns, write_prompts
from verl.config import SFTDataConfig
from verl.data import sft_dataset
from verl.data.loader import StatefulLoader
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import ConfigError, DataError, ModelError
from verl.metrics import notices

TURN = turns("1+1=", "2")
# One token per character, one per special token: 1 + "user\n" + "1+1=" + 1 + "\n", 1 + "assistant\n", "2" + 1, "\n".
LENGTH = (1 + 5 + 4 + 1 + 1) + (1 + 10) + (1 + 1) + 1


def dataset(tmp_path, tokenizer, rows, max_samples=-1, **config):
    path = write_prompts(tmp_path / "sft.parquet", rows)
    return MultiTurnSFTDataset(path, tokenizer, SFTDataConfig(**config), max_samples=max_samples)


def learned(tokenizer, row):
    return tokenizer.decode(row["input_ids"][row["loss_mask"] == 1])


def test_a_row_has_ids_mask_and_positions_of_one_length(tmp_path, tokenizer):
    row = dataset(tmp_path, tokenizer, [{"messages": TURN}])[0]
    text = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert row["input_ids"].tolist() == tokenizer(text)["input_ids"] and len(row["input_ids"]) == LENGTH
    assert row["loss_mask"].tolist() == [0] * 23 + [1, 1, 0]
    assert row["attention_mask"].tolist() == [1] * LENGTH and row["position_ids"].tolist() == list(range(LENGTH))
    assert all(value.dtype.is_floating_point is False for value in row.values())


def test_a_row_is_the_same_when_it_is_asked_for_again_and_when_nothing_is_kept(tmp_path, tokenizer, monkeypatch):
    kept = dataset(tmp_path, tokenizer, [{"messages": TURN}] * 3)
    monkeypatch.setattr(sft_dataset, "KEPT_TOKENS", 0)
    unkept = dataset(tmp_path, tokenizer, [{"messages": TURN}] * 3)
    for name in ("input_ids", "loss_mask"):
        assert kept[1][name].tolist() == kept[1][name].tolist() == unkept[1][name].tolist() == unkept[1][name].tolist()


@pytest.mark.parametrize("columns", [("prompt", "response"), ("question", "answer")])
def test_two_columns_are_recognised_with_a_notice(tmp_path, tokenizer, columns):
    found = dataset(tmp_path, tokenizer, [dict(zip(columns, ("1+1=", "2")))])
    assert found[0]["input_ids"].tolist() == dataset(tmp_path, tokenizer, [{"messages": TURN}])[0]["input_ids"].tolist()
    assert learned(tokenizer, found[0]) == "2<|im_end|>" and "data.messages_key" in notices()


def test_fields_inside_a_column_are_read_by_the_older_keys(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "other"}], "extra_info": {"question": "1+1=", "answer": "2"}}]
    found = dataset(
        tmp_path,
        tokenizer,
        rows,
        prompt_key="extra_info",
        response_key="extra_info",
        prompt_dict_keys=["question"],
        response_dict_keys=["answer"],
    )
    assert found.build_messages(found.dataframe[0], 0) == TURN
    with pytest.raises(DataError, match=r"row 0, column 'extra_info': no field 'reply'"):
        dataset(tmp_path, tokenizer, rows, prompt_key="prompt", response_key="extra_info", response_dict_keys=["reply"])


def test_a_prompt_that_is_a_conversation_keeps_its_messages(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "system", "content": "Add."}, TURN[0]], "response": "2"}]
    found = dataset(tmp_path, tokenizer, rows)
    assert [m["role"] for m in found.build_messages(found.dataframe[0], 0)] == ["system", "user", "assistant"]


def test_named_columns_win_over_a_column_of_messages(tmp_path, tokenizer):
    rows = [{"messages": TURN, "q": "2+2=", "a": "4"}]
    found = dataset(tmp_path, tokenizer, rows, prompt_key="q", response_key="a")
    assert learned(tokenizer, found[0]) == "4<|im_end|>"
    with pytest.raises(DataError, match=r"no column 'b'; the file has: messages, q, a.*data\.response_key"):
        dataset(tmp_path, tokenizer, rows, prompt_key="q", response_key="b")


def test_tools_of_a_row_reach_the_template_as_list_and_as_json(tmp_path, family):
    tokenizer = family("qwen2.5")
    tool = {"type": "function", "function": {"name": "add"}}
    for value in ([tool], json.dumps([tool])):
        row = dataset(tmp_path, tokenizer, [{"messages": TURN, "tools": value}])[0]
        assert '{"type": "function", "function": {"name": "add"}}' in tokenizer.decode(row["input_ids"])
        assert learned(tokenizer, row) == "2<|im_end|>"


def test_thinking_is_switched_by_the_row_and_else_by_the_default(tmp_path, family):
    tokenizer = family("qwen3")
    rows = [{"messages": TURN, "enable_thinking": None}, {"messages": TURN, "enable_thinking": True}]
    found = dataset(tmp_path, tokenizer, rows, enable_thinking_default=False)
    assert learned(tokenizer, found[0]) == "2<|im_end|>"
    assert learned(tokenizer, found[1]) == "<think>\n\n</think>\n\n2<|im_end|>"


def test_turns_as_they_were_produced_are_trained_when_asked_for(tmp_path, family):
    tokenizer = family("qwen3")
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}
    rows = [{"messages": [TURN[0], thought, *TURN]}]
    with pytest.raises(
        DataError, match=r"sft\.parquet, row 0, column 'messages': the chat template changes an earlier assistant turn"
    ):
        dataset(tmp_path, tokenizer, rows)
    row = dataset(tmp_path, tokenizer, rows, ignore_input_ids_mismatch=True)[0]
    assert learned(tokenizer, row).startswith("<think>\nhm\n</think>\n\n2<|im_end|>")


def test_a_conversation_that_is_too_long_is_refused_with_file_row_and_lengths(tmp_path, tokenizer):
    longer = [TURN[0], {"role": "assistant", "content": "2" * 11}]
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, tokenizer, [{"messages": TURN}, {"messages": longer}], max_length=LENGTH + 9)
    message = str(caught.value)
    assert f"sft.parquet, row 1: the conversation has {LENGTH + 10} tokens" in message
    assert f"data.max_length={LENGTH + 9}" in message and f"Set data.max_length={LENGTH + 10}" in message
    assert len(dataset(tmp_path, tokenizer, [{"messages": longer}], max_length=LENGTH + 10)[0]["input_ids"]) == 36


@pytest.mark.parametrize(("how", "text", "mask"), [("left", "2<|im_end|>\n", [1, 1, 0]), ("right", None, [0, 0, 0])])
def test_a_conversation_is_cut_together_with_its_mask(tmp_path, tokenizer, how, text, mask):
    row = dataset(tmp_path, tokenizer, [{"messages": TURN}], max_length=3, truncation=how)[0]
    assert tokenizer.decode(row["input_ids"]) == (text or "<|im_start|>us")
    assert row["loss_mask"].tolist() == mask and row["position_ids"].tolist() == [0, 1, 2]
    assert ("data.max_length" in notices()) is (how == "right")  # nothing left to learn


def test_rows_are_padded_to_the_maximum_or_a_batch_to_its_longest(tmp_path, tokenizer):
    longer = [TURN[0], {"role": "assistant", "content": "22"}]
    rows = [{"messages": TURN}, {"messages": longer}]
    padded = dataset(tmp_path, tokenizer, rows, max_length=30, pad_mode="right")[0]
    assert padded["input_ids"][LENGTH:].tolist() == [tokenizer.pad_token_id] * (30 - LENGTH)
    assert (
        padded["attention_mask"].sum() == LENGTH and padded["loss_mask"].sum() == 2 and len(padded["loss_mask"]) == 30
    )
    found = dataset(tmp_path, tokenizer, rows)
    batch = next(iter(StatefulLoader(found, 2, shuffle=False, collate_fn=found.collate)))
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(batch, (2, LENGTH + 1))
    assert batch["input_ids"][0, -1] == tokenizer.pad_token_id and batch["attention_mask"].sum(-1).tolist() == [26, 27]


def test_a_number_of_samples_is_kept(tmp_path, tokenizer):
    rows = [{"messages": [TURN[0], {"role": "assistant", "content": str(i)}]} for i in range(5)]
    found = dataset(tmp_path, tokenizer, rows, max_samples=2)
    assert [learned(tokenizer, found[i]) for i in range(len(found))] == ["0<|im_end|>", "1<|im_end|>"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], r"no column 'messages'; the file has: text.*prompt and response.*data\.messages_key"),
        ([{"message": TURN}], r"Set data\.messages_key=message\b"),
        ([{"messages": TURN}, {"messages": None}], r"row 1, column 'messages': not a conversation"),
        ([{"messages": TURN}, {"messages": []}], "row 1, column 'messages': the conversation is empty"),
        ([{"messages": TURN[:1]}], "row 0, column 'messages': the conversation has no assistant message"),
        ([{"prompt": "a", "response": None}], "row 0: the response is not text"),
        ([{"prompt": None, "response": "a"}], "row 0: the prompt is empty"),
        ([{"messages": TURN, "tools": "{"}], "row 0, column 'tools': the tools are not valid JSON"),
    ],
)
def test_a_bad_row_is_named_when_the_dataset_is_made(tmp_path, tokenizer, rows, message):
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, tokenizer, rows)


def test_settings_that_do_not_exist_are_refused(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "sft.parquet", [{"messages": TURN}])
    with pytest.raises(ConfigError, match=r"data\.pad_mode.*Allowed: no_padding, right"):
        MultiTurnSFTDataset(path, tokenizer, {"pad_mode": "left"})
    with pytest.raises(ConfigError, match=r"data\.truncation.*Allowed: error, left, right"):
        MultiTurnSFTDataset(path, tokenizer, {"truncation": "middle"})


def test_a_tokenizer_without_chat_template_says_what_to_set(tmp_path, tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ModelError, match=r"^custom_chat_template"):
        dataset(tmp_path, bare, [{"messages": TURN}])


def test_the_dataset_travels_to_loader_processes(tmp_path, tokenizer):
    assert ForkingPickler.dumps(dataset(tmp_path, tokenizer, [{"messages": TURN}]))
    assert ForkingPickler.dumps(dataset(tmp_path, tokenizer, [{"question": "1", "answer": "2"}]))
