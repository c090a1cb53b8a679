"""SwanLab. Its own SWANLAB_* variables apply: SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_LOG_DIR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl import env
from verl.metrics import notice
from verl.observability.tracker import (
    COLUMNS,
    Sample,
    Tracker,
    open_picture,
    scalar_metrics,
    table_rows,
    tracker_package,
)

MARK = "--x_x--0_0--"


class SwanlabTracker(Tracker):
    """One SwanLab run; completions become a table per step.

    Where no mode is set and SwanLab's servers cannot be used (no key, no network), the run is written to disk in
    its ``offline`` form, which ``swanlab sync <folder>`` uploads later; a notice says so.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package("swanlab"):
            import swanlab
        self._swanlab = swanlab
        self.run = self._open(env.get("SWANLAB_MODE"))

    def _open(self, mode: str | None) -> Any:
        options = {"project": self.project_name, "name": self.experiment_name, "config": dict(self.config or {})}
        folder = env.get("SWANLAB_LOG_DIR")
        if folder:
            options["log_dir"] = env.expand(folder)
        if mode:
            return self._swanlab.init(mode=mode, **options)
        try:
            return self._swanlab.init(**options)
        except Exception as error:  # boundary: no key, no network, a server that refuses
            notice(
                "SWANLAB_MODE",
                f"the run is tracked offline, because SwanLab's servers cannot be used ({error}); upload it later "
                "with `swanlab sync <folder>`, or set SWANLAB_API_KEY. SWANLAB_MODE=offline asks for it.",
            )
            return self._swanlab.init(mode="offline", **options)

    def log(self, data: Mapping[str, object], step: int) -> None:
        self.run.log(scalar_metrics(data), step=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(COLUMNS), [[_cell(value) for value in row] for row in table_rows(samples, step)])
        pictures = [self._swanlab.Image(open_picture(s.picture), caption=_caption(s)) for s in samples if s.picture]
        if samples:
            self.run.log({title: table, **({f"{title}/images": pictures} if pictures else {})}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        if exit_code == 0:
            self.run.finish()
        else:
            self.run.finish(state="crashed", error=f"the run ended with exit code {exit_code}")


def _cell(value: object) -> object:
    """A value as the table keeps it: it drops None, and takes pyecharts' mark of code out of texts."""
    return value.replace(MARK, MARK.replace("--", "- -")) if isinstance(value, str) else "" if value is None else value


def _caption(sample: Sample) -> str:
    score = "no score" if sample.score is None else f"score {sample.score:g}"
    return score if sample.ground_truth is None else f"{score}, expected {sample.ground_truth}"
