"""Trackio on the local disk: what was logged is read back, and a resumed run continues."""

from __future__ import annotations

import math
import sys

import pytest

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
        tracking.start(4)
        tracking.log({"critic/score/mean": 0.5, "note": "text"}, 1)
        tracking.log({"critic/score/mean": math.nan}, 2)
        tracking.log_samples("val/generations", [Sample("1+1=", "<b>2</b>", 1.0, "2")], 2)
        assert list(tracking.logger) == ["trackio"], notices()
    with Tracking("sums", "first", "trackio", CONFIG) as tracking:
        tracking.start(4, first_step=2)
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
