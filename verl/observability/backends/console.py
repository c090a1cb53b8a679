"""What scrolls by: in a terminal a table per step and a progress bar with the time left, in a pipe a line per step.

Many people's scripts parse the line ``step:N - key:value - ...``, so it has every key and is never wrapped or coloured;
the tracker ``file`` has every digit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from verl.errors import printable
from verl.observability.samples import sample_panel
from verl.observability.tracker import Sample, Tracker, scalar_metrics

ROWS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "reward",
        (
            ("critic/score/mean", "mean"),
            ("critic/score/max", "max"),
            ("critic/score/min", "min"),
            ("training/zero_variance_groups", "groups without signal"),
        ),
    ),
    (
        "actor",
        (
            ("actor/pg_loss", "loss"),
            ("actor/entropy", "entropy"),
            ("actor/ppo_kl", "kl"),
            ("actor/pg_clipfrac", "clipped"),
            ("actor/grad_norm", "grad norm"),
            ("actor/lr", "lr"),
        ),
    ),
    (
        "critic",
        (
            ("critic/vf_loss", "loss"),
            ("critic/vf_explained_var", "explained"),
            ("critic/grad_norm", "grad norm"),
            ("critic/lr", "lr"),
        ),
    ),
    (
        "length",
        (
            ("prompt_length/mean", "prompt"),
            ("response_length/mean", "response"),
            ("response_length/clip_ratio", "cut off"),
        ),
    ),
    (
        "train",
        (("train/loss", "loss"), ("train/grad_norm", "grad norm"), ("train/lr", "lr"), ("val/loss", "validation loss")),
    ),
    (
        "seconds",
        (
            ("timing_s/wait_for_samples", "wait for samples"),
            ("timing_s/gen", "generate"),
            ("timing_s/reward", "reward"),
            ("timing_s/update_critic", "critic"),
            ("timing_s/update_actor", "actor"),
            ("timing_s/update_weights", "sync"),
            ("timing_s/testing", "validate"),
            ("timing_s/save_checkpoint", "save"),
            ("timing_s/step", "step"),
        ),
    ),
    ("speed", (("perf/throughput", "tokens/s"), ("perf/mfu/actor", "mfu"))),
)
"""The rows of the table: what a person looks at first. Everything else is in the line."""
PARTS = {"table": ("table",), "line": ("line",), "both": ("table", "line")}


class ConsoleTracker(Tracker):
    """Progress on standard output (``trainer.console``); the bar moves only in a real terminal."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        self.console = Console()
        if not self.console.is_terminal:
            self.console = Console(width=max(self.console.width, 120))
        mode = ((config or {}).get("trainer") or {}).get("console") or "auto"
        self._parts = PARTS.get(mode, ("table",) if self.console.is_terminal else ("line",))
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total, self._first, self._began = 0, 0, time.monotonic()

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._total, self._first, self._began = total_steps, first_step, time.monotonic()
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=self.console,
        )
        self._task = self._progress.add_task(self.experiment_name, total=total_steps, completed=first_step, left="-")
        self._progress.start()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        metrics = scalar_metrics(data)
        left = self._left(step)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, left=left or "-")
        if "table" in self._parts:
            self.console.print(step_table(metrics, self._title(metrics, step, left)))
        if "line" in self._parts:
            self.console.print(Text(step_line(metrics, step), style="dim"), soft_wrap=True)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        if samples:
            self.console.print(sample_panel(samples, f"{title} · step {step}"))

    def finish(self, exit_code: int = 0) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _title(self, metrics: Mapping[str, float], step: int, left: str) -> str:
        parts = [f"step {step}/{self._total}" if self._total else f"step {step}"]
        if "training/epoch" in metrics:
            parts.append(f"epoch {int(metrics['training/epoch'])}")
        if left:
            parts.append(f"{left} left")
        return " · ".join(parts)

    def _left(self, step: int) -> str:
        """The time that the remaining steps will take at the pace so far; empty while that is unknown."""
        done = step - self._first
        if not self._total or done <= 0:
            return ""
        seconds = (time.monotonic() - self._began) / done * max(self._total - step, 0)
        return str(timedelta(seconds=round(seconds)))


def step_line(metrics: Mapping[str, float], step: int) -> str:
    """``step:3 - actor/pg_loss:0.25 - ...`` with five significant digits of every number, all of those of a count."""
    shown = {key: str(value) if isinstance(value, int) else f"{value:.5g}" for key, value in metrics.items()}
    return " - ".join([f"step:{step}", *(f"{_plain(key)}:{text}" for key, text in shown.items())])


def step_table(metrics: Mapping[str, float], title: str) -> Group:
    """The few numbers that a person looks at, a row per topic; topics without a number are left out."""
    table = Table(show_header=False, box=ROUNDED)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for topic, entries in ROWS:
        shown = [f"{label} [bold]{_short(metrics[key])}[/]" for key, label in entries if key in metrics]
        if shown:
            table.add_row(topic, "   ".join(shown))
    for key, value in metrics.items():
        if key.startswith("val-core/"):
            table.add_row("validation", f"{_name(key.removeprefix('val-core/'))} [bold green]{_short(value)}[/]")
    if not table.row_count:
        for key, value in list(metrics.items())[:8]:
            table.add_row(_name(key), _short(value))
    return Group(Text(title, style="bold"), table)  # a title of the table itself would wrap at the table's width


def _name(key: str) -> str:
    """A metric's name for the table, where it is no markup."""
    return escape(_plain(key))


def _plain(key: str) -> str:
    """A metric's name, which may hold a word of the data, without control characters and line breaks."""
    return printable(key).replace("\n", "\\n")


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
