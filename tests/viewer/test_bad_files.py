"""A file that is damaged, missing or hostile is a notice of its run; the page shows all the rest."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import socket
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from tests.viewer.served import served
from tests.viewer.test_files_of_runs import dump, log
from verl.journal.ending import read_end, recorded_end
from verl.journal.file import Journal
from verl.journal.places import is_locked
from verl.viewer import samples
from verl.viewer.questions import Question
from verl.viewer.run import ViewedRun

RUNNING = {"state": "running", "host": socket.gethostname(), "pid": os.getpid(),
           "began": psutil.Process().create_time()}  # fmt: skip


@pytest.fixture
def two_runs(tmp_path) -> tuple[Path, Path]:
    """Two folders, each with a step of metrics."""
    folders = tmp_path / "bad", tmp_path / "good"
    for folder in folders:
        folder.mkdir()
        log(folder, 1)
    return folders


def test_a_long_reason_in_chinese_is_read_back(tmp_path):
    with pytest.raises(ValueError), recorded_end(tmp_path, 5):
        raise ValueError("日" * 2000)
    noted = read_end(tmp_path)
    assert (noted["state"], noted["total_steps"]) == ("failed", 5)
    assert noted["why"] == "ValueError: " + "日" * (2000 - len("ValueError: "))


@pytest.mark.parametrize(
    ("code", "state"), [(0, "failed"), (1, "failed"), (127, "failed"), ("no data", "failed"), (143, "stopped")]
)
def test_an_exit_without_a_signal_is_a_failure(tmp_path, code, state):
    with pytest.raises(SystemExit), recorded_end(tmp_path, 5):
        raise SystemExit(code)
    noted = read_end(tmp_path)
    assert noted["state"] == state and (state == "stopped" or "SystemExit" in noted["why"])


@pytest.mark.parametrize(
    ("change", "state"),
    [({}, "running"), ({"began": "soon"}, "failed"), ({"began": 10**400}, "failed"), ({"pid": math.inf}, "failed"),
     ({"pid": 10**30}, "failed"), ({"pid": None}, "failed")],
)  # fmt: skip
def test_a_state_with_wrong_numbers_leaves_the_page_alive(two_runs, change, state):
    (two_runs[0] / "state.json").write_text(json.dumps({**RUNNING, **change}))
    with served(*two_runs) as site:
        rows = site.get("runs")["runs"]
    assert [row["state"] for row in rows] == [state, "unknown"] and [row["last_step"] for row in rows] == [1, 1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples", "config.yaml", "journal.jsonl"])
def test_a_folder_in_place_of_a_file_is_a_notice_of_its_run(two_runs, name):
    bad, _ = two_runs
    if name == "samples":
        (bad / name).touch()
    else:
        (bad / name).unlink(missing_ok=True)
        (bad / name).mkdir()
    with served(*two_runs) as site:
        first, second = site.get("runs")["runs"]
        assert site.get("curves", run=[0, 1], metric="train/loss")["series"][-1]["run"] == 1
    assert second["last_step"] == 1 and second["notices"] == []
    assert name != "metrics.jsonl" or str(bad / name) in " ".join(first["notices"])


def test_links_in_a_circle_are_a_notice(two_runs):
    (two_runs[0] / "metrics-2.jsonl").symlink_to("metrics-2.jsonl")
    (two_runs[0] / "config.yaml").symlink_to("config.yaml")
    with served(*two_runs) as site:
        first, second = site.get("runs")["runs"]
    assert "metrics-2.jsonl" in " ".join(first["notices"]) and second["notices"] == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_a_disk_without_locks_cannot_say_who_holds_one(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    (tmp_path / ".lock").write_text("{}")
    assert is_locked(tmp_path / ".lock") is False
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert is_locked(tmp_path / ".lock") is None


def test_lines_with_numbers_that_no_column_holds_are_left_out(tmp_path):
    log(tmp_path, 1)
    wrong = ['{"step": Infinity, "data": {}}', f'{{"step": {2**63}, "data": {{}}}}', '{"step": 3, "data": [["a", 1]]}',
             f'{{"step": 2, "data": {{"other": 1, "train/loss": {10**400}}}}}']  # fmt: skip
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(line + "\n" for line in wrong)
    log(tmp_path, 4)
    dump(tmp_path, 1, "fine")
    with (tmp_path / "samples" / "1.jsonl").open("a") as file:
        file.write(json.dumps({"input": "c?", "output": "", "score": 10**400}) + "\n")
    with served(tmp_path) as site:
        (series,) = site.get("curves", metric="train/loss")["series"]
        assert (series["x"], series["y"]) == ([1.0, 4.0], [0.5, 2.0])
        assert site.indexed("samples")["total"] == 2
        assert site.refused("curves", metric="other")["key"] == "metric", "no part of a line is taken"
        notices = " ".join(site.get("runs")["runs"][0]["notices"])
    assert "line 5 of" in notices and "the first is line 3" in notices


def test_a_file_of_samples_that_was_deleted_meanwhile_is_a_notice(tmp_path):
    dump(tmp_path, 1, "early")
    dump(tmp_path, 2, "late")
    run = ViewedRun(tmp_path).refresh(samples=True, complete=True)
    columns = run.columns
    (tmp_path / "samples" / "1.jsonl").unlink()
    (tmp_path / "samples" / "2.jsonl").write_text("[]\n" * 4)
    assert run.index.texts(columns, np.arange(4), "output", 10) == [""] * 4
    assert len(run.index.matches(Question([("text", "late")]), columns, math.inf).rows) == 0
    assert {place.name for place in run.index.notices} == {"1.jsonl", "2.jsonl"}
    run.refresh(samples=True, complete=True)
    assert not any("deleted" in text for text in run.about()["notices"]), "what is gone is no longer named"


def test_a_replaced_file_is_not_read_by_its_former_index(tmp_path, monkeypatch):
    for step in (1, 2):
        dump(tmp_path, step, f"before {step}")
    run = ViewedRun(tmp_path).refresh(samples=True, complete=True)
    for step in (1, 2):
        dump(tmp_path, step, f"a longer answer of the process after step {step}")
    monkeypatch.setattr(samples, "READ_SECONDS", -1.0)  # one file per request
    run.refresh(samples=True)
    assert run.indexed() == {"files": 1, "of": 2} and set(run.columns["step"].tolist()) == {2}
    run.refresh(samples=True)
    texts = run.index.texts(run.columns, np.arange(4), "output", 80)
    assert sorted(texts)[:2] == [f"a longer answer of the process after step {step}" for step in (1, 2)]


def test_characters_that_utf_8_does_not_have_are_exported(tmp_path):
    dump(tmp_path, 1, "a\ud800b")
    dump(tmp_path, 2, "＝HYPERLINK(1)")
    dump(tmp_path, 3, "\n=1")
    with served(tmp_path) as site:
        table = pq.read_table(io.BytesIO(site.send("/api/export?what=samples&format=parquet").body))
        assert "a\\ud800b" in table["response"].to_pylist()
        sheet = site.send("/api/export?what=samples").body.decode()
    assert "'＝HYPERLINK(1)" in sheet and "'\n=1" in sheet


def test_the_first_request_to_a_server_may_be_an_export_of_two_runs(two_runs):
    with served(*two_runs) as site:
        lines = site.send("/api/export?what=curves&run=0&run=1&metric=train/loss").body.decode().splitlines()
        assert [line.split(",")[0] for line in lines] == ["run", "bad", "good"]
        log(two_runs[1], 2, **{"val/loss": 1.0})
        assert [one["run"] for one in site.get("curves", run=[0, 1], metric="val/loss")["series"]] == [1]
        error = site.refused("curves", run=[0, 1], metric="train/los")
        assert error["key"] == "metric" and "train/loss" in error["fix"]


def test_an_answer_is_another_one_when_the_run_has_ended(tmp_path):
    log(tmp_path, 1)
    with served(tmp_path) as site:
        with recorded_end(tmp_path, 2):
            changed = site.get("events")["changed"]
            assert site.send(f"/api/events?changed={changed}").status == 204
        assert site.send(f"/api/events?changed={changed}").status == 200


def test_the_time_between_two_processes_of_a_run_is_not_idle(tmp_path):
    """Two processes of ten seconds, in each of which the sampler waits for two; the second begins an hour later."""

    def spans(journal, step, at):
        for stage, begin, end in (("gen", 0, 8), ("update_actor", 8, 10), ("step", 0, 10)):
            journal.write({"event": "span", "step": step, "stage": stage, "thread": "main", "begin": at + begin,
                           "end": at + end})  # fmt: skip

    first = Journal(tmp_path)
    first.begin()
    spans(first, 1, 1000.0)
    second = Journal(tmp_path, 1, first.path.name, first.position())
    second.begin()
    spans(second, 2, 4610.0)
    with served(tmp_path) as site:
        assert len(site.get("gantt", first=1, last=2)["spans"]) >= 4
        roles = {role["role"]: (role["busy"], role["idle"]) for role in site.get("system")["roles"]}
    assert roles["sampling"] == pytest.approx((16, 4)) and roles["training"] == pytest.approx((4, 16))
