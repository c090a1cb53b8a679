"""Users' code from files, under the names that users' code imports."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError
from verl.utils.import_utils import load_extern_object, load_extern_type, load_module


def test_an_object_of_a_file_is_found_and_the_file_runs_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import itertools\nruns = []\nruns.append(1)\nclass Thing: pass\n")
    assert load_extern_type(str(path), "Thing") is load_extern_object(str(path), "Thing")
    assert load_extern_object(f"file://{path}", "runs") == [1]


def test_a_file_that_changed_is_run_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("value = 1\n")
    assert load_extern_object(str(path), "value") == 1
    path.write_text("value = 1000\n")
    assert load_extern_object(str(path), "value") == 1000


def test_home_in_the_path_is_expanded_and_a_module_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("value = 1\n")
    assert load_module("~/mine.py", "verl_test_named_module").__name__ == "verl_test_named_module"


def test_a_module_of_a_package_is_named_by_pkg():
    assert load_extern_object("pkg://verl.errors", "ConfigError") is ConfigError


def test_a_missing_name_and_a_missing_file_are_refused_with_the_near_ones(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(): ...\n")
    with pytest.raises(ConfigError, match=r"mine\.py has no 'compute_scores'.*Did you mean 'compute_score'"):
        load_extern_object(str(tmp_path / "mine.py"), "compute_scores")
    with pytest.raises(ConfigError, match=r"no such Python file.*Did you mean 'mine\.py'"):
        load_module(str(tmp_path / "mime.py"))


def test_an_error_inside_the_file_reaches_the_person_every_time(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_module(str(tmp_path / "mine.py"))
