"""Rows from files, and one clear error for each way in which a file can be wrong."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.rows import write_prompts
from verl.data.files import choose_rows, read_files
from verl.errors import DataError


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path = write_prompts(tmp_path / f"train.{suffix}", 3)
    table, origin = read_files(path)
    assert len(table) == 3
    assert table.to_pylist()[2]["prompt"] == [{"role": "user", "content": "2+2="}]
    assert origin.describe(2) == f"{path}, row 2"


def test_lines_in_a_json_file_are_read_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_files(path)[0].to_pylist() == [{"a": 1}, {"a": 2}]


def test_several_files_stand_one_after_the_other_and_are_told_apart(tmp_path):
    one, two = write_prompts(tmp_path / "a.parquet", 2), write_prompts(tmp_path / "b.jsonl", 3)
    table, origin = read_files([one, two])
    assert len(table) == 5
    assert [origin.locate(row) for row in (0, 1, 2, 4)] == [(str(one), 0), (str(one), 1), (str(two), 0), (str(two), 2)]


def test_a_column_that_only_one_file_has_is_null_in_the_other(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.jsonl").write_text('{"a": 2, "b": "x"}\n')
    table, _ = read_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert table.to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]


def test_a_column_that_starts_late_is_null_before(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    assert read_files(tmp_path / "a.jsonl")[0].to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_home_and_variables_in_a_path_are_expanded(tmp_path, monkeypatch):
    write_prompts(tmp_path / "train.parquet", 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHICH", "train")
    assert len(read_files("~/$WHICH.parquet")[0]) == 1


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": "x\u2028y\x85z"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_files(tmp_path / "a.jsonl")[0].to_pylist() == [{"a": "x\u2028y\x85z"}]


def test_the_index_column_of_pandas_is_not_a_column_of_the_data(tmp_path):
    pd = pytest.importorskip("pandas")
    pd.DataFrame({"a": [1, 2]}, index=[5, 9]).to_parquet(tmp_path / "a.parquet")
    assert read_files(tmp_path / "a.parquet")[0].column_names == ["a"]


def test_a_folder_name_with_an_equals_sign_adds_no_column(tmp_path):
    path = write_prompts(tmp_path / "split=train" / "a.parquet", 1)
    assert "split" not in read_files(path)[0].column_names


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"", r"a\.parquet: not a readable parquet file \(0 bytes\)"),
        ("a.parquet", b"PAR1 and nothing more", "not a readable parquet file"),
        ("a.txt", b"a,b\n", r"unknown kind of file\. Got '\.txt'\. Allowed: \.parquet, \.jsonl, \.json, \.csv"),
        ("a.jsonl", b"", "the file has no rows"),
        ("a.json", b"[]", "the file has no rows"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"row 1 \(line 2\) cannot be read as JSON.*One JSON object per line"),
        ("a.json", b'[{"a": 1},', "cannot be read as JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"row 1 \(line 2\) is not an object"),
        ("a.json", b'[{"a": 1}, 7]', "row 1 is not an object.*Got '7'"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "line 2 is not UTF-8"),
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": 2}\n{"a": "three"}\n',
            r"column 'a': the value in row 2 \(line 3\) is of another type",
        ),
        (
            "a.jsonl",
            b'{"m": {"g": "1"}}\n{"m": {"g": 2}}\n',
            r"column 'm': the value in row 1 \(line 2\) .*Got \"{'g': 2}\"",
        ),
        ("a.jsonl", b'{"a": "fine"}\n{"a": "\\ud800"}\n', r"column 'a': the value in row 1 \(line 2\)"),
    ],
)
def test_a_damaged_file_is_named_with_the_place_of_the_damage(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_files(tmp_path / name)


def test_a_truncated_parquet_file_is_not_read_halfway(tmp_path):
    path = write_prompts(tmp_path / "a.parquet", 50)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="Was it written to its end"):
        read_files(path)


def test_text_in_parquet_that_is_not_utf8_names_its_column(tmp_path):
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"ok": ["x"], "text": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'text' is damaged"):
        read_files(tmp_path / "a.parquet")


def test_files_whose_columns_do_not_fit_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n')
    (tmp_path / "b.jsonl").write_text('{"a": {"b": 1}}\n')
    with pytest.raises(DataError, match=r"b\.jsonl: its columns have other types"):
        read_files([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_a_missing_file_names_the_setting_and_the_near_file(tmp_path):
    write_prompts(tmp_path / "train.parquet", 1)
    with pytest.raises(DataError, match=r"data\.val_files: no such file.*Did you mean 'train\.parquet'"):
        read_files(tmp_path / "tran.parquet", key="data.val_files")


def test_a_folder_in_place_of_a_file_lists_its_files(tmp_path):
    write_prompts(tmp_path / "train.parquet", 1)
    with pytest.raises(DataError, match=r"this is a folder.*It has: train\.parquet"):
        read_files(tmp_path)


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_no_file_at_all_is_said(nothing):
    with pytest.raises(DataError):
        read_files(nothing)


def test_a_required_column_that_one_file_lacks_is_named_with_that_file(tmp_path):
    write_prompts(tmp_path / "a.parquet", 1)
    (tmp_path / "b.jsonl").write_text('{"promt": "x", "answer": "y"}\n')
    with pytest.raises(DataError) as caught:
        read_files([tmp_path / "a.parquet", tmp_path / "b.jsonl"], required=["prompt"], column_key="data.prompt_key")
    message = str(caught.value)
    assert "b.jsonl" in message and "promt, answer" in message
    assert "Set data.prompt_key=promt, if that is the column." in message


def test_rows_are_chosen_by_number_or_by_seed():
    assert choose_rows(5, -1, shuffle=True, seed=1).tolist() == [0, 1, 2, 3, 4]
    assert choose_rows(5, 9, shuffle=False, seed=1).tolist() == [0, 1, 2, 3, 4]
    assert choose_rows(5, 2, shuffle=False, seed=1).tolist() == [0, 1]
    drawn = choose_rows(1000, 10, shuffle=True, seed=1).tolist()
    assert drawn == choose_rows(1000, 10, shuffle=True, seed=1).tolist() == sorted(set(drawn)) and len(drawn) == 10
    assert drawn != choose_rows(1000, 10, shuffle=True, seed=2).tolist()
    with pytest.raises(DataError, match="max_samples"):
        choose_rows(5, 0, shuffle=False, seed=None)
