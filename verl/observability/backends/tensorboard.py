"""Curves for TensorBoard, in ``$TENSORBOARD_DIR`` or ``tensorboard_log/<project>/<experiment>``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl import env
from verl.journal.places import folder_of_run
from verl.observability.tracker import Sample, Tracker, open_picture, scalar_metrics, tracker_package


class TensorboardTracker(Tracker):
    """Scalars under the metric's own name, completions as text; every step is written through.

    A run that begins has a folder of its own (``<experiment>-2`` and so on where former runs have those); one that goes
    on does so in its own, and what it wrote behind the step that it resumes from no longer shows.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        folder = env.get("TENSORBOARD_DIR")
        self.folder = Path(env.expand(folder)) if folder else Path("tensorboard_log", project_name, experiment_name)
        self._open: Any = SummaryWriter
        self._writer: Any = None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self.folder = self.place = folder_of_run(self.folder, first_step > 0, self.before)
        again = {"purge_step": first_step + 1, "filename_suffix": f".{first_step + 1}"} if first_step else {}
        self._writer = self._open(str(self.folder), **again)

    def log(self, data: Mapping[str, object], step: int) -> None:
        writer = self._ready()
        for key, value in scalar_metrics(data).items():
            writer.add_scalar(key, value, step)
        writer.flush()

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        for i, sample in enumerate(samples):
            text = f"score {sample.score}\n\n```\n{sample.prompt}\n```\n\n```\n{sample.response}\n```"
            self._ready().add_text(f"{title}/{i}", text, step)
            if sample.picture is not None:
                pixels = np.asarray(open_picture(sample.picture))
                self._ready().add_image(f"{title}/{i}/images", pixels, step, dataformats="HWC")

    def finish(self, exit_code: int = 0) -> None:
        if self._writer is not None:
            self._writer.close()

    def _ready(self) -> Any:
        if self._writer is None:
            self.start(0)
        return self._writer
