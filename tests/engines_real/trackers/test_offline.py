"""wandb, mlflow and swanlab without a server: what was logged can be read back, and a failing tracker stops nothing."""

from __future__ import annotations

import io
import json
import math
import sys

import mlflow
import pytest
from PIL import Image

from tests.engines_real.trackers.pictures import red
from tests.engines_real.trackers.readers import swanlab_records, swanlab_scalars, wandb_history
from verl.metrics import notices, reset_notices
from verl.observability.tracker import Sample
from verl.observability.tracking import Tracking

CONFIG = {"trainer": {"nnodes": 1, "logger": ["mlflow", "swanlab"]}, "algorithm": {"adv_estimator": "grpo"}}
METRICS = {"critic/score/mean": 0.5, "val-core/gsm8k/acc/mean@8": 0.25, "actor/lr": 1e-6, "note": "text"}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A working directory without servers, keys or a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    reset_notices()
    yield tmp_path
    reset_notices()
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # or the next run of this process is written to this one's folder


@pytest.fixture
def seen() -> Sample:
    """An answer about a red picture."""
    return Sample("What is it?", "red", 1.0, "red", picture=red())


def runs(project: str = "sums"):
    client = mlflow.MlflowClient()
    return client, client.search_runs([client.get_experiment_by_name(project).experiment_id], order_by=["start_time"])


def artifact(run, path: str):
    return json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}"))


def test_mlflow_keeps_metrics_parameters_samples_and_the_end(offline):
    with Tracking("sums", "first", "mlflow", CONFIG) as tracking:
        tracking.start(2)
        tracking.log(METRICS, 1)
        tracking.log(METRICS | {"critic/score/mean": float("nan")}, 2)
        tracking.log_samples("val/generations", [Sample("1+1=", "2", 1.0, "2")], 2)
        tracking.log_samples("val/generations", [Sample("1+2=", "<b>3</b>")], 3)
    client, (run,) = runs()
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [m.step for m in history] == [1, 2] and history[0].value == 0.5 and math.isnan(history[1].value)
    assert run.data.metrics["val-core/gsm8k/acc/mean_at_8"] == 0.25 and "note" not in run.data.metrics
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["algorithm.adv_estimator"] == "grpo" and run.data.params["trainer.nnodes"] == "1"
    assert artifact(run, "config.json") == CONFIG
    for row in ([2, "1+1=", "2", 1.0, "2"], [3, "1+2=", "<b>3</b>", None, None]):
        columns = ["step", "prompt", "response", "score", "ground_truth"]
        assert artifact(run, f"samples/val/generations/{row[0]}.json") == {"columns": columns, "data": [row]}
    assert "mlflow.loggedArtifacts" not in run.data.tags, "a tag grows with the run"


def test_each_tracker_stores_the_pictures_that_a_sample_is_about(offline, seen):
    with Tracking("sums", "first", ["mlflow", "swanlab", "wandb"], CONFIG) as tracking:
        tracking.log_samples("val", [Sample("1+1=", "2", 1.0, "2"), seen], 2)
        assert list(tracking.logger) == ["mlflow", "swanlab", "wandb"], "none has failed"
    _, (run,) = runs()
    stored = mlflow.artifacts.load_image(f"{run.info.artifact_uri}/samples/val/2_1.png")
    assert [row[2] for row in artifact(run, "samples/val/2.json")["data"]] == ["2", "red"]
    folders = (
        (offline / "swanlog", "run-*/media/image/*"),
        (offline / "wandb", "offline-run-*/files/media/images/**/*.png"),
    )
    files = [next(iter(folder.glob(pattern))) for folder, pattern in folders]
    for image in (stored, *map(Image.open, files)):
        assert image.size == (56, 28) and image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_mlflow_takes_more_parameters_and_metrics_than_one_request_holds(offline):
    config = {f"section{i}": {f"key{j}": j for j in range(50)} for i in range(6)}
    with Tracking("sums", "large", "mlflow", config) as tracking:
        tracking.log({f"metric/{i}": i for i in range(1200)}, 1)
    _, (run,) = runs()
    assert len(run.data.params) == 300 and len(run.data.metrics) == 1200


def test_mlflow_goes_on_with_a_named_run_and_marks_a_failed_one(offline, monkeypatch):
    with pytest.raises(KeyError), Tracking("sums", "first", "mlflow", CONFIG) as tracking:
        tracking.log({"x": 1.0}, 1)
        raise KeyError("the run failed")
    client, (run,) = runs()
    assert run.info.status == "FAILED"
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    with Tracking("sums", "first", "mlflow", CONFIG) as tracking:
        tracking.log({"x": 2.0}, 2)
    _, (again,) = runs()
    assert again.info.status == "FINISHED"
    assert [m.value for m in client.get_metric_history(run.info.run_id, "x")] == [1.0, 2.0]


def test_swanlab_keeps_metrics_configuration_samples_and_the_end(offline):
    with Tracking("sums", "first", "swanlab", CONFIG) as tracking:
        tracking.log(METRICS, 1)
        tracking.log(METRICS | {"critic/score/mean": 0.75}, 2)
        tracking.log_samples("val/generations", [Sample("1+1=", "2", 1.0, "2")], 2)
    folder = offline / "swanlog"
    scalars = swanlab_scalars(folder)
    assert scalars["critic/score/mean"] == [(1, 0.5), (2, 0.75)]
    assert scalars["val-core/gsm8k/acc/mean@8"] == [(1, 0.25), (2, 0.25)] and "note" not in scalars
    records = swanlab_records(folder)
    (start,) = [r["start"] for r in records if "start" in r]
    assert (start["project"], start["name"]) == ("sums", "first")
    assert records[-1]["finish"]["state"] == "RUN_STATE_FINISHED"
    assert "adv_estimator: grpo" in next(folder.glob("run-*/files/config.yaml")).read_text()
    (table,) = (json.loads(file.read_text()) for file in folder.glob("run-*/media/echarts/**/*.json"))
    row = {"step": 2, "prompt": "1+1=", "response": "2", "score": 1.0, "ground_truth": "2"}
    assert table["rowData"] == [row] and [one["field"] for one in table["colDefs"]] == list(row)


def test_swanlab_without_key_and_terminal_is_tracked_offline_with_a_notice(offline, monkeypatch):
    monkeypatch.delenv("SWANLAB_MODE")
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with Tracking("sums", "first", "swanlab", CONFIG) as tracking:
        tracking.log({"x": 1.0}, 1)
        assert "swanlab sync" in notices()["SWANLAB_MODE"]
    assert swanlab_scalars(offline / "swanlog")["x"] == [(1, 1.0)]


def test_several_trackers_get_the_same_numbers_and_one_that_fails_is_told_once(offline, monkeypatch):
    broken = "tests.observability.spies:BrokenAtLog"
    with Tracking("sums", "first", ["console", "file", "mlflow", "wandb", "swanlab", broken], CONFIG) as tracking:
        for step in (1, 2, 3):
            if step == 2:  # the store of one tracker goes away in the middle of the run
                monkeypatch.setattr(tracking.logger["mlflow"]._client, "log_batch", _gone)
            tracking.log({"x": step / 2}, step)
        assert list(tracking.logger) == ["console", "file", "wandb", "swanlab"]
    lines = (offline / "sums" / "first.jsonl").read_text().splitlines()
    assert [json.loads(line)["data"]["x"] for line in lines] == [0.5, 1.0, 1.5]
    assert swanlab_scalars(offline / "swanlog")["x"] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert wandb_history(offline / "wandb", "x") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    client, (run,) = runs()
    assert [m.value for m in client.get_metric_history(run.info.run_id, "x")] == [0.5]
    assert "the store is gone" in notices()["trainer.logger=mlflow"] and f"trainer.logger={broken}" in notices()


def _gone(*_args, **_kwargs):
    raise OSError("the store is gone")
