"""Learning curves from metrics files: ``python -m verl.observability.plots a.jsonl b.jsonl -o curve.png``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.errors import DataError, MissingDependencyError, print_answer, suggest
from verl.json_text import read_json

REWARD_KEYS = ("critic/score/mean", "critic/rewards/mean")
LOSS_KEYS = ("train/loss", "val/loss")
HELD_OUT = "held out"
X = {"seconds": ("timing_s/step", "train/time(s)"), "tokens": ("perf/total_num_tokens", "train/global_tokens")}
"""What may be on the axis besides steps -> the metric of a step that is summed, by kind of run."""
Paths = str | Path | Sequence[str | Path]
ACCURACY = re.compile(r"^val-core/.+/mean@\d+$")


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was logged."""

    key: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    label: str = ""


def read_metrics(path: str | Path) -> list[tuple[int, dict[str, float]]]:
    """All steps of a metrics file, in order; a last line that was cut off by a kill is left out.

    Raises:
        DataError: no such file, a damaged line before the last, or no step at all.
    """
    path = Path(path)
    if path.suffix == ".png":
        raise DataError("this is no metrics file", got=str(path), fix=f"Write -o {path} for the picture to draw.")
    if not path.is_file():
        raise DataError("no such metrics file", got=str(path), fix="trainer.logger must name 'file' to write one.")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows: list[tuple[int, dict[str, float]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(logged_step(line))
        except ValueError as error:
            if number == len(lines) and rows:
                break
            raise DataError(f"line {number} is not a metrics line", got=str(path)) from error
    if not rows:
        raise DataError("the metrics file is empty", got=str(path))
    return rows


def logged_step(line: str | bytes) -> tuple[int, dict[str, float]]:
    """(step, values by name) of a line of a metrics file; a value that was NaN is null in it.

    Raises:
        ValueError: it is none.
    """
    record = read_json(line)
    try:
        step, data = int(record["step"]), record["data"]
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError("no step, or no data") from error
    if not isinstance(data, dict) or not -(1 << 63) <= step < 1 << 63:
        raise ValueError("the data is no object, or the step is too large")
    return step, data


def series(rows: Sequence[tuple[int, dict[str, float]]], key: str) -> Series:
    """One metric; steps where it is missing or not finite are left out.

    Raises:
        DataError: the metric was never logged.
    """
    points = [(step, data[key]) for step, data in rows if data.get(key) is not None]
    if not points:
        metrics = sorted({k for _, data in rows for k in data})
        raise DataError("this metric was never logged", got=key, fix=suggest(key, metrics))
    return Series(key, tuple(s for s, _ in points), tuple(float(v) for _, v in points))


def default_keys(rows: Sequence[tuple[int, dict[str, float]]]) -> list[str]:
    """The reward and the held-out accuracies of an RL run, the losses of a supervised one."""
    logged = sorted({k for _, data in rows for k, v in data.items() if v is not None})
    rewards = [k for k in REWARD_KEYS if k in logged][:1]
    keys = rewards + [k for k in logged if ACCURACY.match(k)] or [k for k in LOSS_KEYS if k in logged]
    return keys or logged[:2]


def positions(rows: Sequence[tuple[int, dict[str, float]]], x: str) -> dict[int, float]:
    """Step -> its place on the axis: the step, or the sum of seconds or tokens of all steps so far.

    Raises:
        DataError: the run logged none of these sums.
    """
    if x == "step":
        return {step: float(step) for step, _ in rows}
    total, places, key = 0.0, dict[int, float](), None
    for step, data in rows:
        key = key or next((name for name in X[x] if name in data), None)
        total += float(data.get(key) or 0.0) if key else 0.0
        places[step] = total
    if key is None:
        raise DataError(f"the run logged no {x}", got=x, allowed=["step"], fix=f"It needs one of {', '.join(X[x])}.")
    return places


def plot_run(
    path: Paths,
    out: str | Path,
    keys: Sequence[str] | None = None,
    title: str | None = None,
    x: str = "step",
    smooth: float = 0.0,
) -> Path:
    """Draw the metrics ``keys`` of a run or several, one axis per kind of metric.

    Args:
        x: ``step``, ``seconds`` or ``tokens``.
        smooth: weight of the past in a moving average, below 1, which is drawn over the values; 0: none.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(
            "curves are drawn by matplotlib, which is not installed", fix="In the checkout: pip install -e '.[plots]'"
        ) from error
    matplotlib.use("Agg")  # a run has no screen
    from matplotlib import pyplot as plt

    paths = [path] if isinstance(path, (str, Path)) else list(path)
    kinds: dict[str, list[tuple[Series, list[float]]]] = {}
    for name, rows in zip(_names(paths), map(read_metrics, paths), strict=True):
        places = positions(rows, x)
        for key in keys or default_keys(rows):
            line = replace(series(rows, key), label=f"{name}{key}")
            kinds.setdefault(_kind(key), []).append((line, [places[step] for step in line.steps]))
    figure, axes = plt.subplots(1, len(kinds), figsize=(5.2 * len(kinds), 3.6), squeeze=False, layout="constrained")
    for axis, (kind, group) in zip(axes[0], sorted(kinds.items(), key=lambda kind: kind[0] == HELD_OUT)):
        for line, across in group:
            _draw(axis, line, across, smooth)
        axis.set_xlabel(x)
        axis.set_title(kind, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        if all(0 <= v <= 1 for line, _ in group for v in line.values):
            axis.set_ylim(-0.03, 1.03)
    figure.suptitle(title or ", ".join(dict.fromkeys(Path(run).stem for run in paths)))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    plt.close(figure)
    return out


def _draw(axis: Any, one: Series, across: Sequence[float], smooth: float) -> None:
    marker = "o" if len(one.steps) <= 30 else None
    if smooth:
        import pandas as pd

        mean = pd.Series(one.values).ewm(alpha=1 - smooth).mean()  # corrected at the beginning
        (line,) = axis.plot(across, mean, label=one.label)
        axis.plot(across, one.values, alpha=0.25, color=line.get_color(), label="_")
    else:
        axis.plot(across, one.values, marker=marker, ms=4, label=one.label)


def _kind(key: str) -> str:
    """What shares an axis: held-out results, and otherwise what has the first two words of its name in common."""
    return HELD_OUT if key.startswith(("val-", "val/")) else "/".join(key.split("/")[:2])


def _names(paths: Sequence[str | Path]) -> list[str]:
    """Where the paths of runs differ, before the names of their metrics; nothing for a single run."""
    stems = [os.path.splitext(os.path.abspath(path))[0] for path in paths]
    above = os.path.commonpath([os.path.dirname(stem) for stem in stems])
    return [f"{os.path.relpath(stem, above)}: " for stem in stems] if len(stems) > 1 else [""]


def _weight(text: str) -> float:
    weight = float(text)
    if not 0 <= weight < 1:
        raise argparse.ArgumentTypeError("a weight is 0 or more, and below 1")
    return weight


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("metrics", nargs="+", help="the metrics file of each run (JSON lines, tracker 'file')")
    parser.add_argument("-o", "--out", default=None, help="the PNG to write; by default as the first metrics file")
    parser.add_argument("-k", "--keys", nargs="+", default=None, help="metrics to draw; reward and accuracy by default")
    parser.add_argument("--title", default=None)
    parser.add_argument("-x", choices=("step", *X), default="step", help="what is on the axis; by default the step")
    parser.add_argument("--smooth", type=_weight, default=0.0, help="weight of the past in a moving average, as 0.9")
    args = parser.parse_args(argv)
    first = Path(args.metrics[0])
    default = first.with_suffix(".png") if len(args.metrics) == 1 else first.with_name(f"{first.stem}-compared.png")
    out = args.out or default
    return print_answer(lambda: plot_run(args.metrics, out, args.keys, args.title, args.x, args.smooth))


if __name__ == "__main__":
    sys.exit(main())
