"""Paths: what they mean, what is said when they are wrong, and copies between local folders and HDFS."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.errors import DataError, MissingDependencyError, ModelError
from verl.storage import copy, exists, expand, is_hub_name, resolve


def test_home_and_variables_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("SET", "gsm8k")
    assert expand("~/data/$SET/train.parquet") == "/home/someone/data/gsm8k/train.parquet"


def test_a_missing_file_names_the_near_one_in_its_folder(tmp_path):
    (tmp_path / "train.parquet").touch()
    (tmp_path / "test.parquet").touch()
    with pytest.raises(DataError, match=r"data.train_files: no such file.*trian.parquet.*Did you mean 'train.parquet'"):
        resolve(tmp_path / "trian.parquet", key="data.train_files")


def test_a_missing_file_lists_the_folder_if_nothing_is_near(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"has: a.txt\."):
        resolve(tmp_path / "train.parquet")


def test_a_missing_folder_says_how_far_the_path_exists(tmp_path):
    with pytest.raises(ModelError, match=f"exists only as far as {tmp_path}"):
        resolve(tmp_path / "models" / "qwen" / "config.json", error=ModelError)


def test_hub_names_are_told_from_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert is_hub_name("Qwen/Qwen2.5-0.5B")
    assert not is_hub_name("data/train.parquet")  # the folder data exists here
    assert not is_hub_name("./models/mine")
    assert not is_hub_name("/models/mine")
    assert not is_hub_name("gpt2.parquet")


def test_copying_a_file_makes_the_folder_and_respects_overwrite(tmp_path):
    source, target = tmp_path / "a.txt", tmp_path / "deep" / "er" / "b.txt"
    source.write_text("one")
    assert copy(source, target) == str(target)
    source.write_text("two")
    copy(source, target, overwrite=False)
    assert target.read_text() == "one"
    copy(source, target)
    assert target.read_text() == "two"


def test_copying_into_a_folder_keeps_the_name(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    assert copy(tmp_path / "model", tmp_path / "out") == str(tmp_path / "out" / "model")
    assert (tmp_path / "out" / "model" / "config.json").read_text() == "{}"


def test_an_unknown_argument_of_copy_is_refused(tmp_path):
    with pytest.raises(TypeError, match="overwrit"):
        copy(tmp_path, tmp_path / "b", overwrit=True)


def test_copies_to_and_from_hdfs_use_its_command(tmp_path, fake_hdfs):
    source = tmp_path / "a.txt"
    source.write_text("hello")
    copy(source, "hdfs://cluster/deep/a.txt")
    assert (fake_hdfs / "deep" / "a.txt").read_text() == "hello"
    assert exists("hdfs://cluster/deep/a.txt") and not exists("hdfs://cluster/deep/b.txt")
    copy("hdfs://cluster/deep/a.txt", tmp_path / "back" / "a.txt")
    assert Path(tmp_path / "back" / "a.txt").read_text() == "hello"


def test_a_failing_hdfs_command_shows_what_it_printed(tmp_path, fake_hdfs):
    with pytest.raises(DataError, match="No such file"):
        copy("hdfs://cluster/nothing.txt", tmp_path / "x")


def test_hdfs_without_its_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"not on PATH.*Hadoop client"):
        exists("hdfs://cluster/a.txt")


def test_other_schemes_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="cannot read s3:// paths"):
        copy("s3://bucket/train.parquet", tmp_path / "train.parquet")


@pytest.mark.parametrize("pattern", ["*.parquet", "data/part-?.parquet", "no/where/[ab].parquet"])
def test_a_pattern_is_told_that_it_is_not_expanded(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="Patterns are not expanded: name each file"):
        resolve(pattern)
