"""GSM8K from the authors' jsonl to parquet, and what is said about other files."""

from __future__ import annotations

import re

import pyarrow.parquet as pq
import pytest

from command import run
from gsm8k import final_answer, main
from verl.config import DataConfig
from verl.data import RLHFDataset
from verl.errors import DataError


@pytest.fixture(scope="module")
def converted(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    main(["--local_save_dir", str(folder), "--local_dataset_path", str(shared / "data" / "gsm8k")])
    return folder


def test_the_whole_data_set_is_converted(converted):
    tables = {split: pq.read_table(converted / f"{split}.parquet") for split in ("train", "test")}
    assert {split: len(table) for split, table in tables.items()} == {"train": 7473, "test": 1319}
    first = tables["test"].to_pylist()[0]
    assert first["data_source"] == "openai/gsm8k" and first["ability"] == "math"
    assert first["reward_model"] == {"style": "rule", "ground_truth": "18"}
    assert first["extra_info"]["index"] == 0 and first["extra_info"]["split"] == "test"
    assert first["extra_info"]["answer"].endswith("#### 18")
    (message,) = first["prompt"]
    assert message["role"] == "user" and "####" in message["content"]
    assert message["content"].startswith(first["extra_info"]["question"])


def test_every_ground_truth_is_a_plain_number(converted):
    for split in ("train", "test"):
        rows = pq.read_table(converted / f"{split}.parquet", columns=["reward_model"]).to_pylist()
        assert all(re.fullmatch(r"-?\d+(\.\d+)?", row["reward_model"]["ground_truth"]) for row in rows)


def test_the_result_is_a_dataset_of_prompts(converted, tokenizer):
    found = RLHFDataset(converted / "test.parquet", tokenizer, DataConfig(filter_overlong_prompts=True))
    assert 1200 < len(found) < 1319 and found[0]["reward_model"]["ground_truth"] == "18"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("a\n#### 18", "18"), ("#### 1,080 ", "1080"), ("#### -5", "-5"), ("####2.50", "2.50"), ("no answer", None)],
)
def test_the_final_answer_is_a_number_without_separators(solution, answer):
    assert final_answer(solution) == answer


def write_source(folder, line):
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' + line)
    return str(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "2+2?", "answer": "four"}\n', r"train\.jsonl, row 1: no number after '####'.*Got 'four'"),
        ('{"question": "", "answer": "#### 4"}\n', r"row 1: the column 'question' has no text"),
        ('{"question": null, "answer": null}\n', r"row 1: the column 'question' has no text"),
        ('{"question": "a", "answer": null}\n', r"row 1: the column 'answer' has no text"),
        (
            '{"question": 5, "answer": "#### 4"}\n',
            r"train\.jsonl: column 'question': the value in row 1 \(line 2\) is of another type",
        ),
        (
            '{"question": "\\ud800", "answer": "#### 4"}\n',
            r"column 'question': the value in row 1 \(line 2\) holds characters that",
        ),
        ('{"question": "a"}\n', r"row 1: the column 'answer' has no text"),
        ("{", r"train\.jsonl: row 1 \(line 2\) cannot be read as JSON"),
    ],
)
def test_a_bad_example_is_named_with_its_file_and_row_and_nothing_is_written(tmp_path, line, message):
    source = write_source(tmp_path / "source", line)
    with pytest.raises(DataError, match=message):
        main(["--local_save_dir", str(tmp_path / "out"), "--local_dataset_path", source])
    assert not list((tmp_path / "out").iterdir())


def test_parquet_of_the_hub_in_a_folder_is_read_too(tmp_path, converted):
    source = tmp_path / "clone" / "main"
    source.mkdir(parents=True)
    for split in ("train", "test"):
        rows = pq.read_table(converted / f"{split}.parquet").slice(0, 3).column("extra_info").to_pylist()
        import pyarrow as pa

        pq.write_table(
            pa.Table.from_pylist([{"question": r["question"], "answer": r["answer"]} for r in rows]),
            source / f"{split}-00000-of-00001.parquet",
        )
    main(["--local_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path / "clone")])
    assert len(pq.read_table(tmp_path / "out" / "train.parquet")) == 3


def test_a_folder_without_the_files_says_which_is_missing(tmp_path):
    (tmp_path / "trian.jsonl").touch()
    with pytest.raises(DataError, match=r"--local_dataset_path: no such file.*Did you mean 'trian.jsonl'"):
        main(["--local_save_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path)])


def test_without_network_the_hub_is_an_error_that_names_the_other_way(tmp_path):
    with pytest.raises(DataError, match=r"the hub did not give the data set.*--local_dataset_path"):
        main(["--local_save_dir", str(tmp_path / "out")])


def test_the_command_says_errors_in_one_line_and_ends_with_one(tmp_path, capsys):
    code = run(main, ["--local_save_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path / "none")])
    assert code == 1 and capsys.readouterr().err.startswith("error: --local_dataset_path: no such file or folder.")


def test_where_to_write_must_be_said_once(capsys):
    with pytest.raises(SystemExit):
        main(["--local_save_dir", "a", "--local_dir", "b"])
    assert "--local_save_dir" in capsys.readouterr().err
