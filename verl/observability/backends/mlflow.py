"""MLflow. Its own MLFLOW_* variables apply: the address (MLFLOW_TRACKING_URI), a run to go on with (MLFLOW_RUN_ID)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl import env
from verl.observability.tracker import (
    COLUMNS,
    MetricNames,
    Sample,
    Tracker,
    open_picture,
    scalar_metrics,
    table_rows,
    tracker_package,
)

PARAMS_PER_CALL, METRICS_PER_CALL = 100, 1000  # what MLflow's servers take in one request
LONGEST_PARAM = 6000  # characters
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowTracker(Tracker):
    """One run in the experiment named after the project; without a server it is written to MLflow's local store.

    The configuration becomes parameters (``trainer.total_epochs``) and the file ``config.json``; completions become
    a JSON file per step, with columns and rows. MLflow allows few characters in a name: ``mean@8`` is logged as
    ``mean_at_8``, any other character as ``_``.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package("mlflow"):
            import mlflow
            from mlflow.entities import Metric, Param
        self._metric, self._names = Metric, MetricNames(plain_name)
        self._client = mlflow.MlflowClient()
        self.run_id = self._open()
        if config:
            params = [Param(key, value) for key, value in flatten(config)]
            for part in _parts(params, PARAMS_PER_CALL):
                self._client.log_batch(self.run_id, params=part)
            self._client.log_dict(self.run_id, dict(config), "config.json")

    def _open(self) -> str:
        named = env.get("MLFLOW_RUN_ID")
        if named:
            self._client.update_run(named, status="RUNNING")
            return named
        existing = self._client.get_experiment_by_name(self.project_name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(self.project_name)
        return self._client.create_run(experiment, run_name=self.experiment_name).info.run_id

    def log(self, data: Mapping[str, object], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(self._names.of(key), value, now, step) for key, value in scalar_metrics(data).items()]
        for part in _parts(metrics, METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=part)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        folder = f"samples/{plain_name(title)}"
        if samples:
            # `log_table` reads and writes all former rows, too, and lists the files in a tag of limited length.
            table = {"columns": list(COLUMNS), "data": [list(row) for row in table_rows(samples, step)]}
            self._client.log_dict(self.run_id, table, f"{folder}/{step}.json")
        for i, sample in enumerate(samples):
            if sample.picture is not None:
                self._client.log_image(self.run_id, open_picture(sample.picture), f"{folder}/{step}_{i}.png")

    def finish(self, exit_code: int = 0) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if exit_code == 0 else "FAILED")


def plain_name(key: str) -> str:
    """``val-core/x/mean@8`` as ``val-core/x/mean_at_8``; every other character that MLflow refuses as ``_``."""
    return _FORBIDDEN.sub("_", key.replace("@", "_at_"))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a nested dict as (dotted name, text); a text longer than MLflow takes is cut here only."""
    for key, value in config.items():
        name = f"{prefix}{plain_name(str(key))}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, str(value)[:LONGEST_PARAM]


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
