"""Trackio on the local disk: what was logged is read back, and a resumed run continues."""

from __future__ import annotations

import math
import sys

import pytest
import trackio

from verl.metrics import notices, reset_notices
from verl.observability.tracker import Sample
from verl.observability.tracking import Tracking

CONFIG = {"trainer": {"nnodes": 1}, "reward": {"api_key": "hush"}}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Trackio's storage in a folder of this test; the package reads its variable when it is imported."""
    from trackio import sqlite_storage

    for name, module in list(sys.modules.items()):
        if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    reset_notices()
    return sqlite_storage.SQLiteStorage


def test_trackio_has_metrics_and_samples_and_a_resumed_run_continues(store):
    with Tracking("sums", "first", "trackio", CONFIG) as tracking:
        before = tracking.start(4)
        tracking.log({"critic/score/mean": 0.5, "note": "text"}, 1)
        tracking.log({"critic/score/mean": math.nan}, 2)
        tracking.log_samples("val/generations", [Sample("1+1=", "<b>2</b>", 1.0, "2")], 2)
        assert list(tracking.logger) == ["trackio"], notices()
    with Tracking("sums", "first", "trackio", CONFIG) as tracking:
        tracking.start(4, first_step=2, before=before)
        tracking.log({"critic/score/mean": 0.75}, 3)
    (run,) = store.get_runs("sums")
    logs = store.get_logs("sums", run)
    values = {row["step"]: row["critic/score/mean"] for row in logs if "critic/score/mean" in row}
    assert run == "first" and (values[1], values[3]) == (0.5, 0.75) and math.isnan(float(values[2]))
    (table,) = [row["val/generations"] for row in logs if "val/generations" in row]
    assert table["_value"][0] == {
        "step": 2, "prompt": "1+1=", "response": "<b>2</b>", "score": 1.0, "ground_truth": "2"
    }  # fmt: skip
    assert "hush" not in str(store.get_run_config("sums", run))


def logged(before: dict[str, str] | None, value: float, step: int) -> dict[str, str]:
    """What a run, new or resumed, returns at its start; it logs one value."""
    with Tracking("sums", "first", "trackio", CONFIG) as tracking:
        names = tracking.start(9, first_step=0 if before is None else step - 1, before=before)
        tracking.log({"x": value}, step)
    return names


def values(store) -> list[list[tuple[int, float]]]:
    """Steps and values of every run, the oldest first."""
    records = store.get_run_records("sums")
    logs = [store.get_logs("sums", record["name"], run_id=record["id"]) for record in records]
    return sorted([(row["step"], row["x"]) for row in rows if "x" in row] for rows in logs)


def test_a_resumed_run_continues_its_run_and_none_of_the_same_name(store):
    older = logged(None, 0.25, 1)
    newer = logged(None, 0.5, 1)
    logged(newer, 0.75, 2)
    assert values(store) == [[(1, 0.25)], [(1, 0.5), (2, 0.75)]] and not notices()
    assert logged(older, 1.0, 2) == {}, "the package cannot open it by its name any more"
    assert "another run of Trackio has this name" in notices()["trainer.logger=trackio"]
    assert values(store) == [[(1, 0.25)], [(1, 0.5), (2, 0.75)]]


def test_a_run_that_trackio_lacks_is_not_resumed(store):
    assert logged({"trackio": "0 first"}, 0.5, 2) == {}
    assert "does not exist" in notices()["trainer.logger=trackio"] and not store.get_runs("sums")


def test_a_space_is_private_and_the_machine_is_not_watched(store, monkeypatch):
    init, calls = trackio.init, []

    def spy(*, private, auto_log_gpu, auto_log_cpu, **options):
        calls.append((private, auto_log_gpu, auto_log_cpu))
        return init(**options)

    monkeypatch.setattr(trackio, "init", spy)
    logged(None, 0.5, 1)
    assert calls == [(True, False, False)]
