"""Pairs of answers: the forms that rows may have, what is masked, and what a person is told about bad rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.harness.models import tiny_tokenizer
from tests.harness.rows import write_prompts
from verl.data.preference import PreferenceDataset, last_run
from verl.errors import DataError
from verl.metrics import notices, reset_notices

CHAT = [{"role": "user", "content": "1+1="}]
GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "three"}


def dataset(tmp_path, *rows: dict, **settings) -> PreferenceDataset:
    file = write_prompts(tmp_path / "pairs.jsonl", rows)
    return PreferenceDataset(str(file), tiny_tokenizer(), SimpleNamespace(max_length=64, **settings))


def shown(data: PreferenceDataset, item: int, side: str) -> tuple[str, str]:
    """The whole text, and the part that is learned."""
    row = data[item][side]
    decode = data.tokenizer.decode
    return decode(row["input_ids"]), decode(row["input_ids"][row["loss_mask"].bool()])


def test_texts_and_messages_give_the_same_tokens_and_only_the_answer_is_learned(tmp_path):
    answers = {side: [{"role": "assistant", "content": GOOD[side]}] for side in ("chosen", "rejected")}
    whole = {side: CHAT + turns for side, turns in answers.items()}
    data = dataset(tmp_path, {"prompt": CHAT, **answers}, {"prompt": None, **whole}, {"prompt": CHAT, **whole})
    texts = dataset(tmp_path, GOOD)
    for side, answer in (("chosen", "2"), ("rejected", "three")):
        text = f"<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert shown(texts, 0, side) == (text, f"{answer}<|im_end|>")
        assert [shown(data, item, side) for item in range(3)] == [shown(texts, 0, side)] * 3


def test_earlier_turns_of_the_assistant_are_not_learned(tmp_path):
    prompt = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    data = dataset(tmp_path, {"prompt": prompt, "chosen": "yes", "rejected": "no"})
    assert shown(data, 0, "chosen")[1] == "yes<|im_end|>"
    assert last_run([0, 1, 1, 0, 1, 0]) == [0, 0, 0, 0, 1, 0]
    assert last_run([0, 0]) == [0, 0]


def test_a_batch_holds_chosen_and_rejected_in_turn(tmp_path):
    data = dataset(tmp_path, GOOD, {**GOOD, "rejected": "11", "margin": 0.5})
    batch = data.collate([data[0], data[1]])
    real = batch["attention_mask"].bool()
    texts = [data.tokenizer.decode(ids[m]) for ids, m in zip(batch["input_ids"], real)]
    assert [text.split("assistant\n")[1] for text in texts] == [f"{a}<|im_end|>\n" for a in ("2", "three", "2", "11")]
    assert batch["margin"].tolist() == [0.0, 0.0, 0.5, 0.5] and batch["index"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "row, words",
    [
        ({**GOOD, "rejected": "2"}, "the chosen and the rejected answer are the same"),
        ({**GOOD, "chosen": " "}, "the answer is empty"),
        ({**GOOD, "prompt": None}, "an answer that is text needs a prompt"),
        ({**GOOD, "chosen": "x" * 80}, "more than data.max_length=64"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named_or_left_out_and_counted(tmp_path, row, words):
    with pytest.raises(DataError) as error:
        dataset(tmp_path, GOOD, row)
    assert words in str(error.value) and "pairs.jsonl" in str(error.value) and "row 1" in str(error.value)
    reset_notices()
    data = dataset(tmp_path, row, GOOD, filter_invalid=True)
    assert len(data) == 1 and shown(data, 0, "chosen")[1] == "2<|im_end|>"
    assert "1 of 2 pairs are left out" in notices()["data.filter_invalid"] and words in notices()["data.filter_invalid"]


def test_a_conversation_that_ends_with_the_user_is_refused(tmp_path):
    with pytest.raises(DataError, match="row 0, column 'chosen': the conversation does not end with a turn of the ass"):
        dataset(tmp_path, {"prompt": None, "chosen": CHAT, "rejected": [*CHAT, {"role": "assistant", "content": "2"}]})


def test_a_file_without_the_columns_is_refused_with_those_that_it_has(tmp_path):
    with pytest.raises(DataError, match="chosen"):
        dataset(tmp_path, {"prompt": "a", "better": "b", "worse": "c"})
