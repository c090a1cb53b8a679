"""Files of samples with their tokens: complete or absent, bounded, written behind the run's back."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from tests.harness.models import tiny_tokenizer
from tests.harness.runs import prepare, records, train
from verl.config import PPOTrainerConfig
from verl.data.sample_texts import SampleTexts
from verl.journal.columns import Names
from verl.metrics import notices
from verl.observability import token_dump
from verl.observability.stored_samples import read_lines, read_parquet
from verl.observability.token_dump import KEY, LEFT_OUT, LIMIT, SLOW, Pieces, TokenDump, table_of, write_table
from verl.protocol import DataProto
from verl.trainer.ppo.token_rows import TokenRows
from verl.viewer.detail import token_columns

TALKATIVE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "length": -5, "finish_reason": "mine", "row": "third"}
"""
"""A reward function whose values have names that the files of samples have a use for, too."""


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


def test_texts_of_several_tokens_are_not_kept_for_the_next_step():
    pieces = Pieces(lambda ids: bytes(ids).decode(errors="replace"))
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 256, 500)
        texts = pieces.of(ids, np.array([500])).to_pylist()
        assert "".join(texts) == bytes(ids.tolist()).decode(errors="replace")
    assert len(pieces._texts) <= 256 + 1 and not pieces._joined


def conversation() -> DataProto:
    """Three rows: a tool spoke in the middle of the first, the second is masked out, the third has no versions."""
    return DataProto.from_dict(
        {
            "prompts": torch.tensor([[5, 6]] * 3),
            "responses": torch.tensor([[7, 8, 9, 10], [7, 8, 9, 10], [7, 8, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]),
            "token_versions": torch.tensor([[3, -1, -1, 4], [3, 3, 3, 3], [-1, -1, -1, -1]], dtype=torch.int32),
            "rollout_log_probs": torch.tensor([[-1.0, 0, 0, -2], [-0.5, 0, -0.5, -0.5], [-3, 0, 0, 0]]),
            "old_log_probs": torch.tensor([[-1.5, -7, -8, -1], [-0.5, -1, -0.5, -0.5], [-3, -4, 0, 0]]),
        },
        {"uid": np.array(["a", "a", "b"], dtype=object), "sample_index": np.array([0, 1, 0], dtype=object)},
    )


def stored(batch: DataProto, folder: Path):
    """What a reader gets of each row."""
    texts = SampleTexts(tiny_tokenizer())
    rows = TokenRows(PPOTrainerConfig(), texts)
    described = {"inputs": ["in"] * 3, "outputs": ["out"] * 3, "gts": ["x"] * 3, "scores": [1.0] * 3,
                 "reward_extra_infos": {}}  # fmt: skip
    ctx = SimpleNamespace(step=5, run=SimpleNamespace(learns_from_pairs=False))
    write_table(rows.of(batch, described, ctx, True)(), folder / "5.parquet")
    block = read_parquet(folder / "5.parquet", 5, Names(), Names(), Names())
    return [block.record(row) for row in range(3)]


def test_inserted_tokens_have_no_log_prob_and_no_version(tmp_path):
    first, second, third = stored(conversation(), tmp_path)
    assert first["sampler_log_prob"] == [-1, None, None, -2] and first["version"] == [3, None, None, 4]
    shown = token_columns(first, None)
    assert shown["log_prob"] == [-1, None, None, -2] and shown["trainer_log_prob"] == [-1.5, -7, -8, -1]
    assert shown["ratio"] == [pytest.approx(0.6065307), None, None, pytest.approx(math.e)]
    assert shown["difference"] == [0.5, None, None, -1] and shown["version"] == [3, None, None, 4]
    assert second["sampler_log_prob"] == [-0.5, 0, -0.5, -0.5] and second["version"] == [3] * 4
    assert third["sampler_log_prob"] == [-3, None] and third["version"] == [None, None]
    assert [row["oldest_version"] for row in (first, second, third)] == [3, 3, None]


def test_the_mask_says_what_was_inserted_where_no_versions_are_known(tmp_path):
    batch = conversation()
    batch.pop(batch_keys=["token_versions"])
    first, second, third = stored(batch, tmp_path)
    assert first["sampler_log_prob"] == [-1, None, None, -2] and "version" not in first
    assert second["sampler_log_prob"] == [-0.5, 0, -0.5, -0.5] and third["sampler_log_prob"] == [-3, None]


def test_a_row_without_trained_tokens_has_no_clipped_share(tmp_path):
    assert [row["clipped"] for row in stored(conversation(), tmp_path)] == [1.0, None, 0.0]


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


def test_many_steps_list_their_folder_once(tmp_path, monkeypatch):
    write_table(table(), tmp_path / "1.parquet")
    size, listings, iterdir = (tmp_path / "1.parquet").stat().st_size, [], Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda place: listings.append(place) or iterdir(place))
    dump = TokenDump(tmp_path, int(3.5 * size))
    for step in range(2, 9):
        dump._write(step, table)
    dump.close()
    assert listings == [tmp_path]
    assert sorted(place.name for place in iterdir(tmp_path)) == ["6.parquet", "7.parquet", "8.parquet"]


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
    assert dump.left_out == 2 and "2 steps" in notices()[LEFT_OUT]


def test_old_files_that_cannot_be_deleted_leave_the_new_one(tmp_path):
    (tmp_path / "1.parquet").mkdir()  # no file
    dump = TokenDump(tmp_path, most_bytes=1)
    dump.put(2, table)
    dump.close()
    assert (tmp_path / "2.parquet").is_file() and dump.left_out == 0 and KEY not in notices()
    assert "cannot be deleted" in notices()[f"{LIMIT}, deleting"]


def test_a_file_that_cannot_be_written_is_one_notice(tmp_path):
    (tmp_path / "file").write_text("in the way")
    dump = TokenDump(tmp_path / "file" / "folder")
    dump.put(1, table)
    dump.put(2, table)
    dump.close()
    assert "step 1" in notices()[KEY] and f"set {KEY}=0" in notices()[KEY]
    assert dump.left_out == 2


@pytest.mark.parametrize(("share", "files"), [("0", 0), ("1", 1)])
def test_the_share_of_prompts_with_tokens_is_a_setting(workplace, share, files):
    prepare()
    seen = train("trainer.rollout_data_dir=dumps", f"trainer.rollout_data_tokens={share}",
                 "trainer.default_local_dir=run")  # fmt: skip
    assert len(list(Path("dumps").glob("*.parquet"))) == files and Path("dumps/1.jsonl").is_file()
    assert seen.metrics[0].get(LEFT_OUT) == (0 if files else None)


def test_values_of_a_reward_function_keep_their_names(workplace):
    prepare(TALKATIVE)
    seen = train("trainer.rollout_data_dir=dumps", "trainer.default_local_dir=run")
    width = seen.batches[0].tensors["responses"].shape[1]
    lengths = seen.batches[0].tensors["attention_mask"][:, -width:].sum(-1).tolist()
    lines, rows = records("dumps/1.jsonl"), pq.read_table("dumps/1.parquet").to_pylist()
    assert [line["response_tokens"] for line in lines] == [row["length"] for row in rows] == lengths
    for line, row in zip(lines, rows):
        extra = json.loads(row["extra"])
        for values in (line, extra):
            assert (values["length"], values["reward_finish_reason"], values["reward_row"]) == (-5, "mine", "third")
        assert row["finish_reason"] == line["response_finish_reason"] and row["finish_reason"] in ("stop", "length")
        assert line["row"] == row["row"] in range(8)
    assert "row" in notices()["trainer.rollout_data_dir"]
    index = read_lines(Path("dumps/1.jsonl"), 1, Names(), Names())
    assert index.columns["length"].tolist() == lengths and -1 not in set(index.columns["finish"])


def test_rows_that_a_method_leaves_out_say_it_without_a_ledger(workplace):
    prepare()
    seen = train("trainer.rollout_data_dir=dumps", "trainer.default_local_dir=run", "trainer.ledger=false",
                 "algorithm.use_pf_ppo=true")  # fmt: skip
    reasons = pq.read_table("dumps/1.parquet")["reason"].to_pylist()
    drawn = round(seen.metrics[0]["training/pf_ppo/distinct_rows"] * len(reasons))
    assert (reasons.count(""), reasons.count("not_drawn")) == (drawn, len(reasons) - drawn) and drawn < len(reasons)


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
