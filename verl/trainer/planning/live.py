"""How far a run is: what the files of its folder say of its steps and their seconds, during the run or after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl.errors import DataError
from verl.viewer.run import ViewedRun

WINDOW = 10
"""Last steps whose mean counts: lengths of responses change during a run."""
STAGES = {
    "generate": ("gen",),
    "infer": ("old_log_prob", "ref", "values"),
    "update": ("update_actor", "update_critic"),
    "sync": ("update_weights",),
    "step": ("step",),
}
"""Phase of an estimate -> its stages in ``timing_s/``; a step has checkpoints and validation in it."""


@dataclass(frozen=True)
class RunProgress:
    """Of a run.

    Args:
        state: ``running``, ``complete``, ``stopped``, ``failed`` or ``unknown``.
        last_step: that is logged.
        total_steps: at which the run is complete.
        seconds: phase -> mean over the last `WINDOW` steps; phases without a logged stage are left out.
    """

    state: str
    last_step: int
    total_steps: int
    seconds: dict[str, float]

    @property
    def seconds_left(self) -> float:
        """At the pace of the last steps."""
        return max(0, self.total_steps - self.last_step) * self.seconds["step"]


def progress_of(folder: Path, metrics: Path | None = None) -> RunProgress:
    """From the files that the viewer reads.

    Args:
        metrics: the file of its metrics, where that is outside of the folder.

    Raises:
        DataError: no such folder or file, no step with its seconds, or a run that does not say how many steps it has.
    """
    run = ViewedRun(folder, metrics).refresh()
    last, total = run.log.last_step, run.folder.total_steps
    logged = {name: run.log.values(name) for name in run.log.names}
    seconds = {}
    for phase, stages in STAGES.items():
        columns = [logged[name] for stage in stages if (name := f"timing_s/{stage}") in logged]
        if columns:
            rows = np.nansum(columns, axis=0)[np.isfinite(columns).any(axis=0)]
            seconds[phase] = float(rows[-WINDOW:].mean())
    if last is None or total is None or "step" not in seconds:
        notices = "; ".join(run.folder.notices.values())
        raise DataError(f"the run has logged no step yet, or not its length. {notices}".strip(), key="--live",
                        got=str(folder), fix="Name trainer.default_local_dir of a run that trains.")  # fmt: skip
    return RunProgress(run.folder.state(last)[0], last, total, seconds)
