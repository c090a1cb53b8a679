"""Kinds of files beside parquet and jsonl, and odd ones: each is read to the same rows or refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.rows import write_prompts
from verl.data import RLHFDataset
from verl.data.files import read_files
from verl.errors import DataError
from verl.storage.arrow_types import DEPTH, depth
from verl.storage.formats import first_rows, read_table

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+2="}], "reward_model": {"ground_truth": "007"}} for i in range(3)]
TABLE = pa.Table.from_pylist(ROWS)


def saved(folder: Path, splits: bool = False) -> Path:
    """A folder that `datasets` wrote."""
    from datasets import Dataset, DatasetDict

    data = Dataset(TABLE)
    (DatasetDict(train=data, test=data) if splits else data).save_to_disk(folder)
    return folder


def refused(path: Path | str, words: str) -> str:
    with pytest.raises(DataError, match=words) as caught:
        read_files(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_in_both_of_its_forms_gives_the_rows(tmp_path, form):
    path = tmp_path / "rows.arrow"
    opened = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with opened(path, TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert read_files(path)[0].to_pylist() == ROWS
    assert first_rows(path).to_pylist() == ROWS[:1]
    path.write_bytes(path.read_bytes()[: 40 if form == "file" else 200])
    refused(path, "not a readable arrow file")


def test_a_folder_that_datasets_saved_is_read_and_its_rows_have_numbers(tmp_path):
    table, origin = read_files([saved(tmp_path / "saved"), write_prompts(tmp_path / "more.jsonl", 1)])
    assert (
        len(table) == 4 and table.slice(0, 3).select(TABLE.column_names).to_pylist()[2]["prompt"] == ROWS[2]["prompt"]
    )
    assert origin.describe(2) == f"{tmp_path / 'saved'}, row 2" and origin.describe(3).endswith("more.jsonl, row 0")
    assert first_rows(tmp_path / "saved").to_pylist() == ROWS[:1]


def test_a_saved_folder_of_several_splits_names_them(tmp_path):
    said = refused(saved(tmp_path / "both", splits=True), "this folder holds several splits")
    assert f"{tmp_path}/both/test, {tmp_path}/both/train" in said
    assert len(read_files(tmp_path / "both" / "train")[0]) == 3


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "gone.arrow"])
def test_a_saved_folder_reads_no_file_outside_itself(tmp_path, name):
    folder = saved(tmp_path / "saved")
    (tmp_path / "secret.arrow").write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    refused(folder, "names a file that is not in the folder")


def test_every_value_of_a_csv_is_a_text_as_it_stands(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n"1,5 + ""2""\nis?",007\r\nx,\r\ny,NA\r\n')
    rows = read_files(path)[0].to_pylist()
    assert rows[0] == {"prompt": '1,5 + "2"\nis?', "answer": "007"}
    assert [row["answer"] for row in rows] == ["007", "", "NA"]


def test_a_prompt_and_its_truth_in_csv_make_a_row(tmp_path, tokenizer):
    path = tmp_path / "rows.csv"
    path.write_text('prompt,reward_model\n1+1=,"{""ground_truth"": ""02""}"\n')
    row = RLHFDataset(str(path), tokenizer, {"max_prompt_length": 64})[0]
    assert row["raw_prompt"] == [{"role": "user", "content": "1+1="}] and row["reward_model"] == {"ground_truth": "02"}
    path.write_text("prompt,reward_model\n1+1=,2\n")
    with pytest.raises(DataError, match=r"row 0, column 'reward_model': not an object"):
        RLHFDataset(str(path), tokenizer, {"max_prompt_length": 64})[0]


def test_a_line_of_a_csv_with_too_many_values_is_named_by_its_row(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n3,4,5\n")
    refused(path, "row 1 has 3 values for 2 columns")
    path.write_text("")
    refused(path, "the file has no rows")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rows.tsv", r"unknown kind of file.*pandas\.read_csv\(.*to_parquet"),
        ("rows.pkl", r"unknown kind of file.*pandas\.read_pickle\(.*to_parquet"),
        ("rows.jsonl.gz", r"unknown kind of file.*Unpack it first"),
        ("rows.txt", r"unknown kind of file"),
    ],
)
def test_another_kind_of_file_names_what_converts_it(tmp_path, name, words):
    (tmp_path / name).touch()
    refused(tmp_path / name, words)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"PAR1....", "this is a parquet file"),
        (b"\x1f\x8b\x08.", "compressed by gzip: unpack it"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16: save it as UTF-8"),
    ],
)
def test_a_file_that_is_another_kind_than_its_name_says_is_told_apart(tmp_path, head, words):
    for suffix in ("jsonl", "csv"):
        (tmp_path / f"rows.{suffix}").write_bytes(head)
        refused(tmp_path / f"rows.{suffix}", words)


def test_a_name_of_the_hub_names_the_line_that_saves_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused("openai/gsm8k", "data sets of the hub are saved before a run reads them")
    assert "load_dataset('openai/gsm8k', split='train').to_parquet('train.parquet')" in said
    assert "needs the name of one, too: load_dataset('openai/gsm8k', 'main', ...)" in said
    refused("data/train.parquet", "no such file or folder")


def nested(levels: int, form: str) -> str:
    return {"object": '{"a":' * levels + "1" + "}" * levels, "list": "[" * levels + "]" * levels}[form]


@pytest.mark.parametrize("form", ["object", "list"])
@pytest.mark.parametrize("levels", [DEPTH + 1, 70, 900, 100_000])
def test_json_that_is_nested_too_deep_is_named_with_its_row(tmp_path, form, levels):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": null}\n\n{"x": ' + nested(levels, form) + "}\n")
    refused(path, r"row 1 \(line 3\) (is nested deeper than 50|cannot be read as JSON: nested more than 64)")
    path.write_text('{"x": ' + nested(DEPTH, form) + "}\n")
    assert len(read_table(path)) == 1


def test_a_list_in_json_that_is_nested_too_deep_is_named(tmp_path):
    (tmp_path / "rows.json").write_text("[" * 100_000)
    refused(tmp_path / "rows.json", "the file cannot be read as JSON: nested more")


def test_a_number_of_thousands_of_digits_is_named_with_its_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"x": ' + "1" * 5000 + "}\n")
    refused(tmp_path / "rows.jsonl", r"row 0 \(line 1\) cannot be read as JSON: Exceeds the limit")


def test_types_count_their_levels():
    assert [depth(kind) for kind in (pa.int8(), pa.list_(pa.string()), TABLE.schema.field("prompt").type)] == [0, 1, 2]


def extension() -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16], pa.binary(16)))


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.dictionary(pa.int32(), pa.string()))]))
PLAIN: dict[str, tuple[pa.Array, Any]] = {
    "dictionary": (pa.array(["x"]).dictionary_encode(), "x"),
    "view": (pa.array(["x"], pa.string_view()), "x"),
    "fixed list": (pa.array([["x", "y"]], pa.list_(pa.string(), 2)), ["x", "y"]),
    "extension": (extension(), b"a" * 16),
    "nested dictionary": (pa.array([[{"role": "user", "content": "x"}]], MESSAGES), [{"role": "user", "content": "x"}]),
    "duration": (pa.array([1], pa.duration("s")), None),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_encodings_of_arrow_are_resolved_to_what_they_stand_for(tmp_path, kind):
    values, expected = PLAIN[kind]
    pq.write_table(pa.table({"prompt": ["1+1="], "x": values}), tmp_path / "rows.parquet")
    (row,) = read_table(tmp_path / "rows.parquet").to_pylist()
    assert expected is None or row["x"] == expected


REFUSED: dict[str, tuple[pa.Array, str]] = {
    "map": (pa.array([[("role", "user")]], pa.map_(pa.string(), pa.string())), "rows cannot hold"),
    "map in a list": (pa.array([[[("a", "b")]]], pa.list_(pa.map_(pa.string(), pa.string()))), "rows cannot hold"),
    "unknown time zone": (pa.array([1], pa.timestamp("us", "Mars/Phobos")), "a time that cannot be read"),
    "far future": (pa.array([2**60], pa.timestamp("us")), "a time that cannot be read"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_no_row_can_hold_is_named_with_its_column(tmp_path, kind):
    values, words = REFUSED[kind]
    pq.write_table(pa.table({"prompt": ["1+1="], "x": values}), tmp_path / "rows.parquet")
    refused(tmp_path / "rows.parquet", f"column 'x' holds .*{words}")


def test_two_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"]), tmp_path / "a.parquet")
    refused(tmp_path / "a.parquet", "2 columns have the name 'x'")


def test_a_file_without_rows_is_named_whatever_it_is(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.ParquetWriter(path, TABLE.schema).close()
    refused(path, "the file has no rows")
    pq.write_table(pa.table({}), path)
    refused(path, "the file has no rows")
    with pa.ipc.new_stream(tmp_path / "rows.arrow", TABLE.schema):
        pass
    refused(tmp_path / "rows.arrow", "the file has no rows")
    for made in (path, tmp_path / "rows.arrow"):
        with pytest.raises(DataError, match="the file has no rows"):
            first_rows(made)


def test_flipped_bytes_in_a_parquet_file_give_rows_or_an_error_that_names_it(tmp_path):
    """Names of columns, pages and lengths are hit in turn: no exception of another library comes through."""
    path = tmp_path / "rows.parquet"
    pq.write_table(TABLE, path, compression="none")
    whole, refusals = path.read_bytes(), 0
    for place in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        try:
            read_table(path).to_pylist()
        except DataError as error:
            refusals += str(path) in str(error)
    assert refusals > len(whole) // 7 // 2


def test_a_first_look_reads_one_row_of_a_large_file(tmp_path):
    pq.write_table(pa.table({"x": range(100_000)}), tmp_path / "rows.parquet")
    assert first_rows(tmp_path / "rows.parquet").to_pylist() == [{"x": 0}]
