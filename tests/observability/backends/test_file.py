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


def go_on(behind, steps, before=None, name="e"):
    tracker = FileTracker("p", name)
    tracker.before = before
    tracker.start(10, first_step=behind)
    for step in steps:
        tracker.log({"x": 9}, step)
    tracker.finish()
    return tracker.path


def test_every_run_that_begins_has_a_file_of_its_own_and_none_is_overwritten():
    paths = [write([0, 1, 2]), write([0, 1]), write([0])]
    assert [path.name for path in paths] == ["e.jsonl", "e-2.jsonl", "e-3.jsonl"]
    assert [steps_of(path) for path in paths] == [[0, 1, 2], [0, 1], [0]]


def test_a_run_that_goes_on_does_so_in_its_own_file():
    first, second = write([0, 1, 2]), write([0, 1])
    assert go_on(2, [3, 4], before="e.jsonl") == first
    assert steps_of(first) == [0, 1, 2, 3, 4] and steps_of(second) == [0, 1]


def test_lines_that_a_run_repeats_are_kept_beside_its_file():
    path = write([0, 1, 2, 3])
    path.write_text(path.read_text() + '{"step": 4, "da')  # killed in the middle of a line
    assert go_on(1, [2, 3], before="e.jsonl") == path
    assert go_on(2, [3], before="e.jsonl") == path
    assert steps_of(path) == [0, 1, 2, 3]
    replaced = path.with_name("e.replaced.jsonl").read_text().splitlines()
    assert [line[:10] for line in replaced] == ['{"step": 2', '{"step": 3', '{"step": 4', '{"step": 3']


def test_a_run_that_goes_on_under_another_name_begins_a_file():
    write([0], name="other")
    assert go_on(1, [2], before="e.jsonl", name="other").name == "other-2.jsonl"


def test_a_checkpoint_that_does_not_know_its_file_goes_on_in_the_usual_one():
    path = write([0, 1, 2])
    assert go_on(2, [3]) == path and steps_of(path) == [0, 1, 2, 3]


def test_a_run_that_logs_nothing_leaves_no_file():
    tracker = FileTracker("p", "e")
    tracker.start(10)
    tracker.finish()
    assert not tracker.path.exists()


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    assert str(metrics_path("p", "e")) == "p/e.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "root"))
    assert metrics_path("p", "e") == tmp_path / "root" / "p" / "e.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "x.jsonl"))
    assert write([1]) == tmp_path / "x.jsonl"
