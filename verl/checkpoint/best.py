"""The checkpoint with the best validation (``trainer.best_metric``): named in a file, and kept by retention."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl import env
from verl.checkpoint.files import replace_text
from verl.checkpoint.find import step_folder
from verl.config.schema.role import RunConfig
from verl.errors import CheckpointError, ConfigError, suggest
from verl.json_text import read_json
from verl.metrics import notice

FILE = "best_checkpoint.json"
KEY = "trainer.best_metric"


@dataclass
class BestCheckpoint:
    """``<root>/best_checkpoint.json``: the step of the best checkpoint of a run folder, and the value of each.

    The value of a new step is written before its folder is in place, its name after that: a kill in between loses
    neither. A step that is saved again has no value until its new folder is in place: a kill in between leaves a folder
    that is not compared, never a value of another one.

    Args:
        root: the run folder.
        metric: name of a validation metric.
        mode: whether a larger or a smaller value is better. Of equal values the earlier step stays.
    """

    root: Path
    metric: str
    mode: Literal["max", "min"]

    def __post_init__(self) -> None:
        self.values = self._read()
        self._replacing: dict[int, float] = {}

    @classmethod
    def of(cls, settings: RunConfig) -> BestCheckpoint | None:
        """As the settings say; None without a metric."""
        if not settings.best_metric:
            return None
        mode: Literal["max", "min"] = "min" if settings.best_mode == "min" else "max"
        return cls(Path(env.expand(settings.default_local_dir)), settings.best_metric, mode)

    @property
    def step(self) -> int | None:
        """Of the best checkpoint that is in place."""
        return self._best([step for step in self.values if step_folder(self.root, step).is_dir()])

    def holds(self, folder: Path) -> bool:
        """Whether this step folder of the run is the best one."""
        return self.step is not None and folder.name == step_folder(self.root, self.step).name

    def offer(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the value of a checkpoint that is about to be put in place; without one it is not compared."""
        self.values.pop(step, None)
        self._replacing.clear()
        value = metrics.get(self.metric)
        if value is not None and not math.isfinite(value):
            notice(KEY, f"{self.metric} is {value} at step {step}, which is never the best")
            value = None
        if value is not None:
            held = self._replacing if step_folder(self.root, step).is_dir() else self.values
            held[step] = float(value)
        self._write()

    def published(self) -> None:
        """Name the best checkpoint, now that the one on offer is in place."""
        self.values |= self._replacing
        self._replacing.clear()
        self._write()

    def recovered(self) -> None:
        """Forget values of checkpoints that never came, and name one that a kill left unnamed."""
        self.values = {step: value for step, value in self.values.items() if step_folder(self.root, step).is_dir()}
        self._write()

    def _write(self) -> None:
        """Name the best checkpoint that is in place (null: none yet), and keep all values."""
        if not self.values and not (self.root / FILE).is_file():
            return
        entry = {"global_step": self.step, "metric": self.metric, "mode": self.mode, "values": self.values}
        try:
            replace_text(self.root / FILE, json.dumps(entry) + "\n")
        except OSError as error:  # the checkpoint itself may still be saved, and other ranks wait for it
            notice(KEY, f"{self.root / FILE} could not be written: {error}")

    def _best(self, steps: Sequence[int]) -> int | None:
        sign = -1.0 if self.mode == "min" else 1.0
        return max(steps, key=lambda step: (sign * self.values[step], -step), default=None)

    def _read(self) -> dict[int, float]:
        """Step -> value of what an earlier part of the run saved; none if that compared another metric."""
        file = self.root / FILE
        if not file.is_file():
            return {}
        try:
            entry = read_json(file.read_text(encoding="utf-8"))
            values = {int(step): float(value) for step, value in entry["values"].items()}
            compared = (entry["metric"], entry["mode"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fix = "Delete it: the next validated checkpoint writes it again."
            raise CheckpointError("this file cannot be read", key=KEY, got=str(file), fix=fix) from error
        if compared != (self.metric, self.mode):
            notice(KEY, f"{file} compared {compared[0]} ({compared[1]}); it starts again with {self.metric}")
            return {}
        return values


def check_metric(settings: RunConfig, metrics: Mapping[str, float]) -> None:
    """Raise `ConfigError` if a validation did not measure ``trainer.best_metric``."""
    name = settings.best_metric
    if name and name not in metrics:
        raise ConfigError(
            "the validation has no such metric",
            key=KEY,
            got=name,
            allowed=sorted(metrics),
            fix=suggest(name, list(metrics)),
        )
