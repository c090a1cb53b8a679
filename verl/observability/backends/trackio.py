"""Trackio. Its own settings apply (TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL); without them it writes files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.observability.tracker import COLUMNS, Sample, Tracker, absent_package, scalar_metrics, table_rows


class TrackioTracker(Tracker):
    """One Trackio run, which a resumed run continues; completions become a table per step."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        try:
            import trackio
        except ImportError as error:
            raise absent_package("trackio", "trackio") from error
        self._trackio: Any = trackio
        self._run: Any = None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._run = self._trackio.init(
            project=self.project_name,
            name=self.experiment_name,
            config=dict(self.config or {}),
            resume="allow" if first_step else "never",
            embed=False,
        )

    def log(self, data: Mapping[str, object], step: int) -> None:
        self._ready().log(scalar_metrics(data), step=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        table = self._trackio.Table(data=[dict(zip(COLUMNS, row)) for row in table_rows(samples, step)])
        self._ready().log({title: table}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _ready(self) -> Any:
        if self._run is None:
            self.start(0)
        return self._run
