"""Metrics as JSON lines: the run's own record, from which plots and summaries are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from verl import env
from verl.journal.places import file_of_run
from verl.json_text import read_json
from verl.observability.tracker import Tracker, scalar_metrics


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """$VERL_FILE_LOGGER_PATH, else ``<$VERL_FILE_LOGGER_ROOT or .>/<project>/<experiment>.jsonl``."""
    named = env.get("VERL_FILE_LOGGER_PATH")
    if named:
        return Path(env.expand(named))
    return Path(env.expand(env.get("VERL_FILE_LOGGER_ROOT") or ".")) / project_name / f"{experiment_name}.jsonl"


class FileTracker(Tracker):
    """One line ``{"step": n, "data": {...}}`` per step, written through at once; NaN and infinity become null.

    A run that begins has a file of its own: ``<experiment>.jsonl``, or ``<experiment>-2.jsonl`` and so on where former
    runs have those. A resumed run appends to its own, behind the step that it resumes from; lines that it will
    repeat go to ``<its file>.replaced.jsonl``.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        self.path = metrics_path(project_name, experiment_name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self.path = self.place = file_of_run(self.path, first_step > 0, self.before, private=False)
        if first_step > 0 and self.path.exists():
            self._set_aside(first_step)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, data: Mapping[str, object], step: int) -> None:
        if self._file is None:
            self.start(0)
        assert self._file is not None, "start opens it"
        finite = {k: v if math.isfinite(v) else None for k, v in scalar_metrics(data).items()}
        self._file.write(json.dumps({"step": int(step), "data": finite}) + "\n")
        self._file.flush()

    def finish(self, exit_code: int = 0) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            if not self.path.stat().st_size:
                self.path.unlink()

    def _set_aside(self, done: int) -> None:
        """Leave the lines up to the step ``done`` in the file."""
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        later = [line for line in lines if _step_of(line) > done]
        if later:
            with self.path.with_suffix(f".replaced{self.path.suffix}").open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in later)
            fresh = self.path.with_suffix(f"{self.path.suffix}.part")
            fresh.write_text("".join(line + "\n" for line in lines if _step_of(line) <= done), encoding="utf-8")
            fresh.replace(self.path)


def _step_of(line: str) -> float:
    """The step of a line; a line that was cut off by a kill counts as one to be replaced."""
    try:
        return float(read_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
