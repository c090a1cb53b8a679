"""Curves for TensorBoard, in ``$TENSORBOARD_DIR`` or ``tensorboard_log/<project>/<experiment>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl import env
from verl.errors import MissingDependencyError
from verl.observability.tracker import Sample, Tracker, numbers


class TensorboardTracker(Tracker):
    """Scalars under the metric's own name, completions as text; every step is written through.

    What an earlier run wrote behind the step that this one resumes from no longer shows.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "the package tensorboard is not installed",
                key="trainer.logger",
                got="tensorboard",
                fix="pip install tensorboard, or leave 'tensorboard' out of trainer.logger.",
            ) from error
        folder = env.get("TENSORBOARD_DIR")
        self.folder = Path(env.expand(folder)) if folder else Path("tensorboard_log", project_name, experiment_name)
        self._writer = SummaryWriter(str(self.folder))
        self._before = len(list(self.folder.glob("events.*"))) > 1

    def start(self, total_steps: int, first_step: int = 0) -> None:
        if self._before:
            self._writer.close()
            repeated = first_step + 1 if first_step else 0
            self._writer = type(self._writer)(str(self.folder), purge_step=repeated, filename_suffix=f".{repeated}")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in numbers(data).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        for i, sample in enumerate(samples):
            text = f"score {sample.score}\n\n```\n{sample.prompt}\n```\n\n```\n{sample.response}\n```"
            self._writer.add_text(f"{title}/{i}", text, step)

    def finish(self, exit_code: int = 0) -> None:
        self._writer.close()
