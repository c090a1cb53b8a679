"""Trackers that record what they are told, or fail at a chosen moment."""

from __future__ import annotations

from typing import Any, ClassVar

from verl.observability.tracker import Tracker


class SpyTracker(Tracker):
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, project_name, experiment_name, config=None):
        super().__init__(project_name, experiment_name, config)
        self.calls.append(("open", project_name, experiment_name, config))

    def start(self, total_steps, first_step=0):
        self.calls.append(("start", total_steps, first_step))

    def log(self, data, step):
        self.calls.append(("log", dict(data), step))

    def log_samples(self, title, samples, step):
        self.calls.append(("samples", title, list(samples), step))

    def finish(self, exit_code=0):
        self.calls.append(("finish", exit_code))


class BrokenAtLog(Tracker):
    def log(self, data, step):
        raise OSError("disk full")


class BrokenAtStart(Tracker):
    def __init__(self, *_):
        raise RuntimeError("no network")

    def log(self, data, step): ...


class ExitsAtLog(Tracker):
    """As `rich` does where nobody reads standard output."""

    def log(self, data, step):
        raise SystemExit(1)
