"""Weights & Biases. Its own WANDB_* variables (mode, directory, entity, key) apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.loading.secrets import hide
from verl.errors import MissingDependencyError
from verl.observability.tracker import Sample, Tracker, open_picture, scalar_metrics


class WandbTracker(Tracker):
    """One wandb run; completions go into a table per step."""

    hides_secrets = True  # its proxy may need one

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        try:
            import wandb
        except ImportError as error:
            raise MissingDependencyError(
                "the package wandb is not installed",
                key="trainer.logger",
                got="wandb",
                fix="In the checkout: pip install -e '.[wandb]', or leave 'wandb' out of trainer.logger.",
            ) from error
        self._wandb = wandb
        trainer = (config or {}).get("trainer") or {}
        proxy = trainer.get("wandb_proxy")
        settings = wandb.Settings(https_proxy=proxy) if proxy else None
        self.run = wandb.init(
            project=project_name,
            name=experiment_name,
            config=hide(config or {}),
            settings=settings,
            reinit="finish_previous",
        )

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.run.log(scalar_metrics(data), step=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        table = self._wandb.Table(columns=["step", "prompt", "response", "score", "ground_truth"])
        images = []
        for row, s in enumerate(samples):
            table.add_data(step, s.prompt, s.response, s.score, s.ground_truth)
            if s.picture is not None:
                images.append(
                    self._wandb.Image(open_picture(s.picture), caption=f"row {row}, score {s.score}: {s.response}")
                )
        self.run.log({title: table, **({f"{title}/images": images} if images else {})}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        self.run.finish(exit_code=exit_code)
