"""The run's own record: exact, readable by any JSON parser, and right after a crash."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from verl.observability.backends.file import FileTracker, metrics_path


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_ROOT", "VERL_FILE_LOGGER_PATH"):
        monkeypatch.delenv(name, raising=False)


def write(steps, name="e"):
    tracker = FileTracker("p", name)
    for step in steps:
        tracker.log({"x": step + 0.5}, step)
    tracker.finish()
    return tracker.path


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_holds_the_step_and_all_scalars_as_numbers():
    tracker = FileTracker("p", "e")
    tracker.log({"a": 1 / 3, "n": np.int64(4), "t": torch.tensor(2.5), "b": True, "text": "no", "many": [1, 2]}, 3)
    line = tracker.path.read_text()  # before finish: every line is written through
    assert json.loads(line) == {"step": 3, "data": {"a": 1 / 3, "n": 4.0, "t": 2.5, "b": 1}}


def test_nan_and_infinity_become_null():
    tracker = FileTracker("p", "e")
    tracker.log({"nan": float("nan"), "inf": float("-inf")}, 1)
    assert json.loads(tracker.path.read_text(), parse_constant=pytest.fail)["data"] == {"nan": None, "inf": None}


def test_a_resumed_run_replaces_the_steps_that_it_repeats():
    path = write([0, 1, 2, 3])
    path.write_text(path.read_text() + '{"step": 4, "da')  # killed in the middle of a line
    assert write([2, 3, 4]) == path
    assert steps_of(path) == [0, 1, 2, 3, 4]
    assert not path.with_suffix(".previous.jsonl").exists()


def test_a_run_from_the_first_step_sets_the_former_file_aside():
    path = write([0, 1, 2])
    write([0, 1])
    assert steps_of(path) == [0, 1]
    assert steps_of(path.with_suffix(".previous.jsonl")) == [0, 1, 2]


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    assert str(metrics_path("p", "e")) == "p/e.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "root"))
    assert metrics_path("p", "e") == tmp_path / "root" / "p" / "e.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "x.jsonl"))
    assert write([1]) == tmp_path / "x.jsonl"


def test_a_run_that_resumes_keeps_the_step_it_resumes_from_and_nothing_behind_it():
    write([0, 1, 2, 3, 4])
    tracker = FileTracker("p", "e")
    tracker.start(10, first_step=2)
    tracker.log({"x": 9}, 3)
    tracker.finish()
    assert steps_of(tracker.path) == [0, 1, 2, 3]


def test_a_new_run_keeps_nothing_of_a_former_one_not_even_its_step_zero():
    path = write([0, 1, 2])
    tracker = FileTracker("p", "e")
    tracker.start(10)
    tracker.log({"x": 9}, 1)
    tracker.finish()
    assert steps_of(path) == [1]
    assert steps_of(path.with_suffix(".previous.jsonl")) == [0, 1, 2]
