"""Rows of any kind become the same file."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from verl.api.rows import files_of
from verl.errors import DataError

ROWS = [{"prompt": "1+1", "answer": "2", "hint": 7}, {"prompt": "2+2", "answer": "4", "hint": 8}]
PROMPTS = [
    {"prompt": f"{n}+{n}", "reward_model": {"ground_truth": str(2 * n), "style": "rule"}, "extra_info": {"hint": 6 + n}}
    for n in (1, 2)
]


def written(data, folder, **given):
    settings = {"key": "data", "is_prompts": True, **given}
    return pq.read_table(files_of(data, folder / "train.parquet", **settings)).to_pylist()


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        {name: [row[name] for row in ROWS] for name in ROWS[0]},
        pd.DataFrame(ROWS),
        datasets.Dataset.from_list(ROWS),
        [{**row, "hint": np.int64(row["hint"])} for row in ROWS],
    ],
    ids=["list", "tuple", "generator", "columns", "pandas", "datasets", "numpy"],
)
def test_rows_of_every_kind_become_prompts_with_a_truth(tmp_path, data):
    assert written(data, tmp_path) == PROMPTS


def test_texts_are_prompts_and_conversations_stay_as_they_are(tmp_path):
    assert written(["a", "b.c"], tmp_path) == [{"prompt": "a"}, {"prompt": "b.c"}]
    turns = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert written(turns, tmp_path, is_prompts=False) == turns


def test_what_upstreams_schema_names_keeps_its_column(tmp_path):
    row = {
        "prompt": "p",
        "data_source": "d",
        "reward_model": {"ground_truth": "1"},
        "extra_info": {"index": 3},
        "more": 1,
    }
    assert written([row], tmp_path) == [
        {key: row[key] for key in ("prompt", "data_source", "reward_model")} | {"extra_info": {"index": 3, "more": 1}}
    ]


@pytest.mark.parametrize("data", ["a.parquet", Path("a.parquet")])
def test_a_path_stays_a_path(tmp_path, data):
    assert files_of(data, tmp_path / "x", "data", True) == "a.parquet"
    assert files_of([data, "b.jsonl"], tmp_path / "x", "data", True) == ["a.parquet", "b.jsonl"]


@pytest.mark.parametrize(
    "data, said",
    [
        ([], "there are no rows"),
        (3, "data is rows or a path, not int"),
        ([["a", "b"]], "row 0 is no dict but list"),
        (pd.DataFrame([["a", "b"]]), "columns need names. Got 'row 0, column 0'"),
        ({"prompt": ["a"], "answer": []}, "columns differ in length. Got 'prompt: 1, answer: 0'"),
        ({"prompt": "a", "answer": "b"}, "one row stands in a list"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b", "x": "c"}], "the values of a column have one type"),
        ([{"prompt": "a", "y": 1, "extra_info": "x"}], "extra_info is no mapping"),
    ],
)
def test_what_makes_no_rows_is_refused_with_what_does(tmp_path, data, said):
    with pytest.raises(DataError) as caught:
        files_of(data, tmp_path / "x.parquet", "data", True)
    assert said in str(caught.value)
