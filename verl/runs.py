"""The runs below a folder, and how two of them differ: ``python -m verl.runs [FOLDER | compare A B]``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.errors import DataError, print_answer
from verl.journal.ledger_reader import table
from verl.metrics import notice
from verl.observability.metrics_log import MetricsLog
from verl.observability.plots import ACCURACY, LOSS_KEYS, REWARD_KEYS
from verl.viewer.folder import CONFIG, METRICS
from verl.viewer.run import ViewedRun, setting_rows

USUAL = Path("runs")
"""Where runs are that name no folder."""
MARKS = (METRICS, CONFIG)
DEPTH = 3
"""Levels of folders in which runs are looked for."""


def runs_below(folder: Path) -> list[Path]:
    """The folders of runs in a folder, itself included, by name; nothing inside of a run is looked at.

    Raises:
        DataError: there is no such folder.
    """
    if not folder.is_dir():
        raise DataError("there is no such folder", got=str(folder), fix="python -m verl.runs FOLDER")
    runs, level = list[Path](), [folder]
    for _ in range(DEPTH):
        is_run = {place: any(os.path.isfile(place / mark) for mark in MARKS) for place in level}
        runs += [place for place in level if is_run[place]]
        level = [below for place in level if not is_run[place] for below in _folders_in(place)]
    return sorted(runs)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [below for below in folder.iterdir() if os.path.isdir(below)]
    except OSError as error:
        notice(str(folder), f"the folder cannot be listed, its runs are left out: {error}")
        return []


def best_of(log: MetricsLog) -> str:
    """The best validation of a run with its step, else its last reward or loss; empty where there is none."""
    for name in log.names:
        if ACCURACY.match(name) or name == "val/loss":
            values = log.values(name)
            if not (values == values).any():
                continue
            sign = 1 if name == "val/loss" else -1
            row = min((row for row, value in enumerate(values) if value == value), key=lambda row: sign * values[row])
            return f"{name} {values[row]:.4g} at step {log.steps()[row]}"
    name = next((name for name in (*REWARD_KEYS, *LOSS_KEYS) if name in log.names), "")
    return f"{name} {last_of(log, name):.4g}, the last" if name else ""


def last_of(log: MetricsLog, name: str) -> float:
    """The last finite value of a metric; NaN: none."""
    values: list[float] = log.values(name).tolist() if name in log.names else []
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def listing(folder: Path) -> str:
    """A row per run: its state, its last step, and how good it got; what could not be read of one is a notice."""
    rows = []
    for place in runs_below(folder):
        run = ViewedRun(place).refresh()
        about = run.about()
        if about["notices"]:
            notice(str(place), "; ".join(about["notices"]))
        steps = f"{about['last_step'] or 0}/{about['total_steps'] or '?'}"
        rows.append((place.relative_to(folder), about["state"], steps, best_of(run.log), about["why"]))
    return table(("run", "state", "steps", "best validation", "why"), rows)


def comparison(one: Path, other: Path) -> str:
    """Settings and last metrics in which two runs differ."""
    runs = [ViewedRun(place).refresh() for place in (one, other)]
    settings = [(row["key"], *row["values"]) for row in setting_rows(runs)]
    names = sorted({name for run in runs for name in run.log.names})
    values = [(name, *(last_of(run.log, name) for run in runs)) for name in names]
    differing = [(name, *map("{:.6g}".format, pair)) for name, *pair in values if pair[0] != pair[1]]
    heads = [run.name if runs[0].name != runs[1].name else str(run.folder.path) for run in runs]
    return "\n\n".join([table(("setting", *heads), settings), table(("last value of", *heads), differing)])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, or the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m verl.runs", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="FOLDER | compare A B", help=f"by default {USUAL}")
    words = parser.parse_args(argv).words
    if words[:1] == ["compare"] and len(words) == 3:
        return print_answer(lambda: comparison(Path(words[1]), Path(words[2])))
    if len(words) > 1:
        parser.error("name one folder, or: compare A B")
    return print_answer(lambda: listing(Path(words[0]) if words else USUAL))


if __name__ == "__main__":
    sys.exit(main())
