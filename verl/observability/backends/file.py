"""Metrics as JSON lines: the run's own record, from which plots and summaries are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from verl import env
from verl.json_text import read_json
from verl.observability.tracker import Tracker, numbers


def metrics_path(project_name: str, experiment_name: str) -> Path:
    """$VERL_FILE_LOGGER_PATH, else ``<$VERL_FILE_LOGGER_ROOT or .>/<project>/<experiment>.jsonl``."""
    named = env.get("VERL_FILE_LOGGER_PATH")
    if named:
        return Path(env.expand(named))
    return Path(env.expand(env.get("VERL_FILE_LOGGER_ROOT") or ".")) / project_name / f"{experiment_name}.jsonl"


class FileTracker(Tracker):
    """One line ``{"step": n, "data": {...}}`` per step, written through at once; NaN and infinity become null.

    A resumed run goes on in the same file behind the step that it resumes from, and so replaces the steps that it
    repeats. A run that starts from its beginning begins a new file; the former one is kept as
    ``<experiment>.previous.jsonl``.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        self.path = metrics_path(project_name, experiment_name)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None
        self._done: int | None = None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._done = first_step

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self._file is None:
            self._make_room(step if self._done is None else self._done + 1 if self._done else 0)
            self._file = self.path.open("a", encoding="utf-8")
        finite = {k: v if math.isfinite(v) else None for k, v in numbers(data).items()}
        self._file.write(json.dumps({"step": int(step), "data": finite}) + "\n")
        self._file.flush()

    def finish(self, exit_code: int = 0) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _make_room(self, first_step: int) -> None:
        """Keep the earlier steps of this run; set the whole file aside if there are none."""
        if not self.path.exists():
            return
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        earlier = [line for line in lines if _step_of(line) < first_step]
        if earlier == lines:
            return
        if not earlier:
            self.path.replace(self.path.with_suffix(".previous.jsonl"))
            return
        fresh = self.path.with_suffix(".jsonl.part")
        fresh.write_text("".join(line + "\n" for line in earlier), encoding="utf-8")
        fresh.replace(self.path)


def _step_of(line: str) -> float:
    """The step of a line; a line that was cut off by a kill counts as one to be replaced."""
    try:
        return float(read_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
