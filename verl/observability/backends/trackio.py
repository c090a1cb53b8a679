"""Trackio. Its own settings apply (TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL); without them it writes files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.observability.tracker import COLUMNS, Sample, Tracker, scalar_metrics, table_rows, tracker_package


class TrackioTracker(Tracker):
    """One Trackio run, which a resumed run continues; completions become a table per step.

    A Space that it makes is private. Only what is logged is taken, not the use of the machine.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package("trackio", "pip install trackio"):
            import trackio
        self._trackio: Any = trackio
        self._run: Any = None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        number, _, name = (self.before or "").partition(" ") if first_step else ("", "", "")
        self._run = self._trackio.init(
            project=self.project_name,
            name=name or self.experiment_name,
            config=dict(self.config or {}),
            resume="must" if name else "never",
            **options_of(self._trackio.init),
        )
        if name and self._run.id != number:  # the package takes the newest run of a name
            raise ConfigError(
                "another run of Trackio has this name by now",
                key="trainer.experiment_name",
                got=name,
                fix="Give each run another name.",
            )
        self.resume_name = f"{self._run.id} {self._run.name}"

    def log(self, data: Mapping[str, object], step: int) -> None:
        self._ready().log(scalar_metrics(data), step=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        table = self._trackio.Table(data=[dict(zip(COLUMNS, row)) for row in table_rows(samples, step)])
        self._ready().log({title: table}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def release(self) -> None:
        self.finish()

    def _ready(self) -> Any:
        if self._run is None:
            self.start(0)
        return self._run


def options_of(init: Callable[..., object]) -> dict[str, bool]:
    """The arguments of ``trackio.init`` without which it would show, record or publish more than it gets."""
    silent = ("embed", "auto_log_gpu", "auto_log_cpu")
    options = {"private": True} | dict.fromkeys(silent, False)
    return {name: value for name, value in options.items() if name in inspect.signature(init).parameters}
