"""Additions: every sum right, test pairs held out, equal seeds equal rows."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from arithmetic import draw_pairs, main
from verl.config import DataConfig, SFTDataConfig
from verl.data import MultiTurnSFTDataset, RLHFDataset
from verl.errors import DataError
from verl.metrics import notices


def write(folder, *flags):
    main(["--local_save_dir", str(folder), "--train_size", "300", "--val_size", "50", "--sft_size", "200", *flags])
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "test", "sft")}


def test_the_files_have_the_sizes_and_the_form_that_was_asked_for(tmp_path, tokenizer):
    found = write(tmp_path)
    assert {name: len(rows) for name, rows in found.items()} == {"train": 300, "test": 50, "sft": 200}
    row = found["train"][7]
    (message,) = row["prompt"]
    left, right = message["content"].removesuffix("=").split("+")
    assert message["role"] == "user" and len(left) == len(right) == 2
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(left) + int(right))}
    assert row["data_source"] == "arithmetic" and row["extra_info"] == {"index": 7, "split": "train"}
    assert len(RLHFDataset(tmp_path / "train.parquet", tokenizer, DataConfig())) == 300
    assert len(MultiTurnSFTDataset(tmp_path / "sft.parquet", tokenizer, SFTDataConfig())) == 200


def test_every_answer_of_the_supervised_rows_is_the_bare_sum(tmp_path):
    for row in write(tmp_path)["sft"]:
        asked, said = row["messages"]
        left, right = asked["content"].removesuffix("=").split("+")
        assert said == {"role": "assistant", "content": str(int(left) + int(right))}


def test_no_question_occurs_twice(tmp_path):
    found = write(tmp_path)
    questions = [row["prompt"][0]["content"] for name in ("train", "test") for row in found[name]]
    questions += [row["messages"][0]["content"] for row in found["sft"]]
    assert len(set(questions)) == len(questions) == 550 and not notices()


def test_equal_seeds_write_equal_rows(tmp_path):
    one, again, other = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", "--seed", "1")
    assert one == again and one["train"] != other["train"]


def test_supervised_pairs_overlap_with_training_before_they_overlap_with_test():
    train, test, sft = draw_pairs(6000, 2000, 4000, seed=0, digits=2)
    assert len(train) == 6000 and len(test) == 2000 and len(sft) == len(set(sft)) == 4000
    assert not set(test) & (set(train) | set(sft)) and set(train) & set(sft)
    assert "3900 of its pairs are training prompts too: there are only 8100 pairs" in notices()["--sft_size"]


def test_numbers_have_the_digits_that_were_asked_for():
    for digits, low, high in ((1, 0, 9), (2, 10, 99), (4, 1000, 9999)):
        numbers = [n for part in draw_pairs(40, 10, 10, seed=0, digits=digits) for pair in part for n in pair]
        assert low <= min(numbers) and max(numbers) <= high


def test_more_rows_than_pairs_are_refused():
    with pytest.raises(DataError, match="there are 100 pairs of 1-digit numbers, fewer than 20 test and 90 other rows"):
        draw_pairs(90, 20, 10, seed=0, digits=1)


def test_a_size_of_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        write(tmp_path, "--digits", "0")
    assert "--digits must be at least 1" in capsys.readouterr().err
