"""What a person wants to know when a run is over: where everything is stored, how good it got, what comes next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from verl.api.run import Run
from verl.errors import VerlError
from verl.metrics import notice

VALIDATION = re.compile(r"^val-core/.+/mean@\d+$|^val/loss$")
LENGTHS = ("prompt_length", "response_length")
ROLLOUTS = ("rollout_data_dir", "validation_data_dir")


def tell_end(run: Run) -> None:
    """Print the panel of a run that is complete."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in panel_lines(run):
        table.add_row(name, value)
    console = Console()
    console.print(Panel(table, title=run.folder.name, title_align="left", expand=False))
    for command in next_of(run):
        console.print(command, soft_wrap=True, highlight=False, markup=False)  # to be copied: no line is broken


def panel_lines(run: Run) -> list[tuple[str, str]]:
    """The lines of the panel."""
    rows = [("steps", str(run.steps)), *_best(run), ("metrics", str(run.folder / "metrics.jsonl"))]
    rows += [("curve", str(curve))] if (curve := _curve(run)) else []
    checkpoint = run.checkpoint
    rows.append(("checkpoint", str(checkpoint) if checkpoint else "none: trainer.save_freq is -1"))
    for word in run.words:
        key, _, value = word.partition("=")
        if key.removeprefix("trainer.") in ROLLOUTS:
            rows.append(("samples", value))
    return rows


def next_of(run: Run) -> list[str]:
    """What may come next, as commands: twice the steps, and answers of the trained model."""
    if run.checkpoint is None:
        return []
    overrides = dict(word.split("=", 1) for word in run.words if "=" in word)
    lengths = [f" rollout.{one}={overrides[f'data.max_{one}']}" for one in LENGTHS if f"data.max_{one}" in overrides]
    return [
        f"verl resume {run.folder} trainer.total_training_steps={2 * run.steps}",
        f"verl generate model.path={run.model_path} data.path=prompts.jsonl{''.join(lengths)}",
    ]


def _best(run: Run) -> list[tuple[str, str]]:
    """The best validation of each kind, with its step."""
    frame: Any = run.metrics
    best = []
    for key in [column for column in frame.columns if VALIDATION.match(column)]:
        values = frame[key].dropna()
        if not len(values):
            continue
        step = values.idxmin() if key == "val/loss" else values.idxmax()
        best.append(("best", f"{key} {values[step]:.4g} at step {step}, at last {values.iloc[-1]:.4g}"))
    return best


def _curve(run: Run) -> Path | None:
    try:
        return Path(run.plot())
    except (VerlError, ImportError, OSError) as error:
        notice("verl", f"no curve was drawn: {error}")
        return None
