"""ClearML without a server: an offline session holds what was logged, and how the run ended."""

from __future__ import annotations

import inspect
import json
import math
import multiprocessing
import random
import re
import signal
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clearml import Task

from tests.engines_real.trackers.pictures import red
from verl.metrics import notices, reset_notices
from verl.observability.backends.clearml import UNCONNECTED
from verl.observability.tracker import Sample
from verl.observability.tracking import Tracking

CONFIG = {"trainer": {"nnodes": 1}, "reward": {"api_key": "hush"}}


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    """The folder of offline sessions."""
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Task.set_offline(True)
    reset_notices()
    return tmp_path


def session(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The task, the events, and the names of all files of the only session."""
    (archive,) = folder.rglob("offline-*.zip")
    with zipfile.ZipFile(archive) as files:
        names = files.namelist()
        task = json.loads(files.read("task.json"))
        lines = [line for name in names if name.endswith(".jsonl") for line in files.read(name).splitlines()]
    events = [event for line in lines for event in json.loads(line)]
    return task, events, names


def test_clearml_has_metrics_samples_and_the_configuration_without_its_secrets(sessions):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Tracking("sums", "first", "clearml", CONFIG) as tracking:
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        tracking.start(2)
        tracking.log({"critic/score/mean": 0.5, "loss": 2, "note": "text"}, 1)
        tracking.log({"critic/score/mean": math.nan}, 2)
        shown = [Sample("1+1=", "<b>2</b>", 1.0, "2"), Sample("What is it?", "red", picture=red())]
        tracking.log_samples("val/generations", shown, 2)
        assert list(tracking.logger) == ["clearml"], notices()
        assert not multiprocessing.active_children()
    task, events, names = session(sessions)
    scalars = [
        (e["metric"], e["variant"], e["iter"], e["value"]) for e in events if e["type"] == "training_stats_scalar"
    ]
    assert ("critic", "score/mean", 1, 0.5) in scalars and ("loss", "loss", 1, 2) in scalars
    assert not any("note" in scalar for scalar in scalars)
    assert (task["name"], task["project_name"]) == ("first", "sums")
    assert "nnodes" in json.dumps(task["configuration"]) and "hush" not in json.dumps(task)
    (table,) = [json.loads(event["plot_str"]) for event in events if event["type"] == "plot"]
    cells = table["data"][0]["cells"]["values"]
    assert "<b>2</b>" in json.dumps(cells) and any(name.endswith((".png", ".jpeg", ".jpg")) for name in names)


def test_a_run_that_failed_is_a_failed_task(sessions, monkeypatch):
    reasons = []
    monkeypatch.setattr(Task, "mark_failed", lambda _task, status_reason: reasons.append(status_reason))
    with pytest.raises(KeyError), Tracking("sums", "first", "clearml", CONFIG) as tracking:
        tracking.log({"x": 1.0}, 1)
        raise KeyError("the run failed")
    assert reasons == ["the run ended with exit code 1"] and not notices()


def test_neither_random_numbers_nor_other_libraries_are_touched(sessions):
    random.seed(11)
    np.random.seed(12)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with Tracking("sums", "first", "clearml", CONFIG) as tracking:
        tracking.log({"x": 1.0}, 1)
        assert tracking.logger["clearml"]._task._resource_monitor is None
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    task, *_ = session(sessions)
    script = task.get("script") or {}
    assert not any(script.get(word) for word in ("repository", "diff", "version_num", "requirements"))


def test_every_framework_that_clearml_connects_is_switched_off():
    connected = set(re.findall(r'should_connect\("(\w+)"', inspect.getsource(Task.init)))
    assert connected and connected | {"detect_repository"} == set(UNCONNECTED)
