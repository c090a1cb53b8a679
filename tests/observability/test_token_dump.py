"""Files of samples with their tokens: complete or absent, bounded, written behind the run's back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.harness.models import tiny_tokenizer
from tests.harness.runs import prepare, train
from verl.journal.columns import Names
from verl.metrics import notices
from verl.observability import token_dump
from verl.observability.stored_samples import read_parquet
from verl.observability.token_dump import KEY, LIMIT, SLOW, Pieces, TokenDump, table_of, write_table


def table(rows: int = 3, length: int = 4, drawn=None):
    """A step's samples, all of one length."""
    columns = {"step": [7] * rows, "uid": [f"p{row // 2}" for row in range(rows)], "output": ["text"] * rows,
               "score": np.arange(rows) / 2, "length": [length] * rows, "row": ["no number", *range(1, rows)],
               "finish_reason": ["stop"] * rows, "gts": [{"a": float("nan")}] * rows}  # fmt: skip
    drawn = np.ones(rows, dtype=bool) if drawn is None else drawn
    values = {"token_id": np.arange(length * int(drawn.sum())), "advantage": np.ones(length * int(drawn.sum()))}
    return table_of(columns, {"reason": ["mine"] * rows}, values, np.full(rows, length), drawn)


def test_a_text_of_several_tokens_stands_at_the_first_of_them():
    tokenizer = tiny_tokenizer()
    text = "añ日🙂b"
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    texts = Pieces(tokenizer.decode).of(ids, np.array([len(ids)])).to_pylist()
    assert "".join(texts) == text and texts[0] == "a" and texts[-1] == "b"
    assert len(texts) == len(ids) > len(text)


def test_tokens_of_sentencepiece_keep_the_spaces_between_words(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/tinystories-260k")
    text = "Once upon a time, a cat sat. 日 It was happy"
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    texts = Pieces(tokenizer.decode).of(ids, np.array([len(ids)])).to_pylist()
    assert "".join(texts).strip() == text and " cat" in "".join(texts) and len(texts) == len(ids)


def test_a_text_never_joins_tokens_of_two_rows():
    tokenizer = tiny_tokenizer()
    parts = tokenizer.encode("日", add_special_tokens=False)
    pieces = Pieces(tokenizer.decode)
    split = pieces.of(np.array(parts), np.array([1, len(parts)])).to_pylist()
    assert "日" not in split and split[0] and split[1]
    assert pieces.of(np.array(parts + parts), np.array([3, 6])).to_pylist() == ["日", "", "", "日", "", ""]


def test_rows_that_are_not_drawn_have_no_tokens(tmp_path):
    write_table(table(drawn=np.array([True, False, True])), tmp_path / "7.parquet")
    rows = pq.read_table(tmp_path / "7.parquet").to_pylist()
    assert [row["token_id"] for row in rows] == [[0, 1, 2, 3], None, [4, 5, 6, 7]]
    assert [row["row"] for row in rows] == [None, 1, 2] and rows[0]["gts"] == '{"a": null}'
    assert rows[1]["extra"] == '{"reason": "mine"}' and rows[1]["reason"] is None


def test_a_row_group_holds_few_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(token_dump, "TOKENS_PER_GROUP", 8)
    write_table(table(rows=5), tmp_path / "7.parquet")
    file = pq.ParquetFile(tmp_path / "7.parquet")
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [2, 2, 1]
    block = read_parquet(tmp_path / "7.parquet", 7, Names(), Names(), Names())
    assert [block.record(row)["token_id"][0] for row in range(5)] == [0, 4, 8, 12, 16]
    assert block.texts([4, 0], "output", 2) == ["te", "te"]


def test_beyond_the_bound_the_oldest_files_are_deleted(tmp_path):
    write_table(table(), tmp_path / "size.parquet")
    size = (tmp_path / "size.parquet").stat().st_size
    (tmp_path / "size.parquet").unlink()
    dump = TokenDump(tmp_path, int(2.5 * size))
    for step in (8, 9, 10):
        dump.put(step, table)
        dump.close()
        dump = TokenDump(tmp_path, int(2.5 * size))
    assert {place.name for place in tmp_path.iterdir()} == {"9.parquet", "10.parquet"}
    assert "step 8" in notices()[LIMIT]


def test_a_disk_that_is_too_slow_costs_tokens_and_no_time(tmp_path):
    gate, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        gate.wait()
        return table()

    dump = TokenDump(tmp_path)
    for step in range(1, 5):
        dump.put(step, slow)
    begun.wait()
    gate.set()
    dump.close()
    assert {place.name for place in tmp_path.iterdir()} == {"1.parquet", "2.parquet"}
    assert "step 3" in notices()[SLOW]


def test_a_file_that_cannot_be_written_is_one_notice(tmp_path):
    (tmp_path / "file").write_text("in the way")
    dump = TokenDump(tmp_path / "file" / "folder")
    dump.put(1, table)
    dump.put(2, table)
    dump.close()
    assert "step 1" in notices()[KEY]


@pytest.mark.parametrize(("share", "files"), [("0", 0), ("1", 1)])
def test_the_share_of_prompts_with_tokens_is_a_setting(workplace, share, files):
    prepare()
    train("trainer.rollout_data_dir=dumps", f"trainer.rollout_data_tokens={share}", "trainer.default_local_dir=run")
    assert len(list(Path("dumps").glob("*.parquet"))) == files and Path("dumps/1.jsonl").is_file()


def test_a_part_of_the_prompts_is_drawn_with_all_their_answers(workplace):
    prepare()
    train("trainer.rollout_data_dir=dumps", "trainer.rollout_data_tokens=0.5", "trainer.total_training_steps=3",
          "trainer.total_epochs=9", "trainer.default_local_dir=run")  # fmt: skip
    rows = [row for step in (1, 2, 3) for row in pq.read_table(f"dumps/{step}.parquet").to_pylist()]
    by_prompt: dict[str, set[bool]] = {}
    for row in rows:
        by_prompt.setdefault(row["uid"], set()).add(row["token_id"] is not None)
    assert len(by_prompt) == 12 and all(len(kinds) == 1 for kinds in by_prompt.values())
    assert 0 < sum(kinds == {True} for kinds in by_prompt.values()) < 12
