"""One run as the page sees it: its files are read again when they change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.viewer.curves import MetricsLog
from verl.viewer.folder import RunFolder, shown


class ViewedRun:
    """A run's folder with what was read of it.

    Args:
        metrics, samples: places outside of the folder, where the run has them there.
    """

    def __init__(self, folder: Path, metrics: Path | None = None, samples: Path | None = None):
        self.folder = RunFolder(folder, metrics, samples)
        self.log = MetricsLog()
        # Requests are answered by several threads; each sees the columns between two refreshes.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.folder.path.name

    @contextmanager
    def opened(self) -> Iterator[ViewedRun]:
        """The run with what is on the disk now; one request at a time."""
        with self._lock:
            self.folder.notices.clear()
            self.log.refresh(self.folder.metrics_file())
            yield self

    def changed(self) -> str:
        """A text that is another one when there is something new."""
        return f"{self.log.position}"

    def about(self) -> dict[str, Any]:
        """The row of the list of runs."""
        last = self.log.last_step
        state, why = self.folder.state(last, self.total_steps)
        notices = [*self.folder.notices.values(), *filter(None, [self.log.notice])]
        return {
            "name": self.name, "folder": str(self.folder.path), "state": state, "why": why, "last_step": last,
            "total_steps": self.total_steps, "metrics": len(self.log.names), "samples": "none",
            "notices": notices,
        }  # fmt: skip

    @property
    def total_steps(self) -> int | None:
        """At which the run is complete; None: not known."""
        total = self.folder.setting("total_training_steps")
        return total if isinstance(total, int) else None

    @property
    def samples_per_step(self) -> int | None:
        """Answers that a step samples by the configuration; None: not known."""
        config = self.folder.config()
        prompts, each = config.get("data.train_batch_size"), config.get("actor_rollout_ref.rollout.n", 1)
        return prompts * each if isinstance(prompts, int) and isinstance(each, int) else None


def differences(runs: list[ViewedRun]) -> list[dict[str, Any]]:
    """Settings with the value of each run; of several runs those that differ. None: the run has no such setting."""
    configs = [run.folder.config() for run in runs]
    names = sorted({name for config in configs for name in config})
    rows = [{"key": name, "values": [shown(c[name]) if name in c else None for c in configs]} for name in names]
    return [row for row in rows if len(runs) == 1 or len(set(row["values"])) > 1]
