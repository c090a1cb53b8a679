"""Weights & Biases. Its own WANDB_* variables (mode, directory, entity, key) apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.loading.secrets import hide
from verl.observability.tracker import (
    COLUMNS,
    Sample,
    Tracker,
    open_picture,
    scalar_metrics,
    table_rows,
    tracker_package,
)


class WandbTracker(Tracker):
    """One wandb run; completions go into a table per step."""

    hides_secrets = True  # its proxy may need one

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        self._wandb, self.run = self._begin()

    def _begin(self) -> tuple[Any, Any]:
        """The module, and the run that takes what is logged."""
        with tracker_package("wandb"):
            import wandb
        config = self.config or {}
        proxy = (config.get("trainer") or {}).get("wandb_proxy")
        settings = wandb.Settings(https_proxy=proxy) if proxy else None
        run = wandb.init(
            project=self.project_name,
            name=self.experiment_name,
            config=hide(config),
            settings=settings,
            reinit="finish_previous",
        )
        return wandb, run

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.run.log(scalar_metrics(data), step=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        table = self._wandb.Table(columns=list(COLUMNS))
        images = []
        for row, (s, values) in enumerate(zip(samples, table_rows(samples, step))):
            table.add_data(*values)
            if s.picture is not None:
                images.append(
                    self._wandb.Image(open_picture(s.picture), caption=f"row {row}, score {s.score}: {s.response}")
                )
        self.run.log({title: table, **({f"{title}/images": images} if images else {})}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        self.run.finish(exit_code=exit_code)
