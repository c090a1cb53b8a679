"""The metrics of a run as columns: read as they are written, grouped, and thinned for a picture."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np

from verl.errors import DataError, suggest
from verl.json_text import JsonObject
from verl.observability.backends.console import ROWS
from verl.observability.plots import X, logged_step

MOST_POINTS = 2000
VALIDATION = ("val-core/", "val-aux/", "val/")


class MetricsLog:
    """A metrics file that may grow; `refresh` takes in what is new.

    Attributes:
        names: of all metrics, in order of appearance.
        notice: about lines that are none; empty.
    """

    def __init__(self) -> None:
        self._start_over(None)

    def _start_over(self, identity: tuple[str, int] | None) -> None:
        self._identity, self._offset, self._line = identity, 0, 0
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._nulls: dict[str, list[int]] = {}  # rows in which a metric is null: it was NaN, which is a point to see
        self.notice = ""

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def last_step(self) -> int | None:
        """The last step that was logged; None: none."""
        return max(self._steps) if self._steps else None

    @property
    def position(self) -> int:
        """Grows with the file."""
        return self._offset

    def refresh(self, path: Path | None) -> None:
        """Read the lines that were added; a file that was replaced, as by a resumed run, is read again.

        Raises:
            OSError: it cannot be read.
        """
        if path is None:
            self._start_over(None)
            return
        with path.open("rb") as file:
            status = path.stat()
            if (str(path), status.st_ino) != self._identity or status.st_size < self._offset:
                self._start_over((str(path), status.st_ino))
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset, self._line = self._offset + len(line), self._line + 1
                self._take(line, path)

    def _take(self, line: bytes, path: Path) -> None:
        try:
            step, data = logged_step(line)
            values = {
                name: math.nan if value is None else float(value)
                for name, value in data.items() if value is None or isinstance(value, int | float)
            }  # fmt: skip
        except (ValueError, OverflowError):
            self.notice = f"line {self._line} of {path} is not a metrics line: it is left out"
            return
        row = len(self._steps)
        self._steps.append(step)
        for name, value in values.items():
            if data[name] is None:
                self._nulls.setdefault(name, []).append(row)
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (row - len(column)))
            column.append(value)

    def values(self, name: str) -> np.ndarray:
        """(rows,) float64, NaN where a row has none.

        Raises:
            DataError: no such metric.
        """
        column = self._columns.get(name)
        if column is None:
            raise DataError("the run has not logged this metric", key="metric", got=name, fix=suggest(name, self.names))
        made = np.full(len(self._steps), np.nan)
        made[: len(column)] = column
        return made

    def at(self, step: int, prefixes: tuple[str, ...]) -> dict[str, float]:
        """The finite values that a step logged under names that begin like this."""
        rows = [row for row, logged in enumerate(self._steps) if logged == step]
        named = ((name, column) for name, column in self._columns.items() if name.startswith(prefixes))
        return {
            name: column[row]
            for name, column in named
            for row in rows
            if row < len(column) and math.isfinite(column[row])
        }

    def steps(self) -> np.ndarray:
        """(rows,) int64."""
        return np.array(self._steps, dtype=np.int64)

    def axis(self, x: str, samples_per_step: int | None = None) -> np.ndarray:
        """(rows,) float64: the place of each row: its step, seconds of all steps up to it, or samples.

        Raises:
            DataError: the run has not logged what it needs.
        """
        if x == "step":
            return self.steps().astype(float)
        if x == "samples":
            if samples_per_step is None:
                raise DataError("the number of samples per step is not in the run's config.yaml", key="x", got=x,
                                fix="Choose x=step.")  # fmt: skip
            return self.steps() * float(samples_per_step)
        if x != "time":
            raise DataError("no such axis", key="x", got=x, allowed=["step", "time", "samples"])
        name = next((name for name in X["seconds"] if name in self._columns), None)
        if name is None:
            raise DataError("the run has not logged the seconds of its steps", key="x", got=x, fix="Choose x=step.")
        return np.cumsum(np.nan_to_num(self.values(name)))

    def points(self, name: str, x: str, since: float, samples_per_step: int | None) -> list[tuple[float, float, int]]:
        """(place, value, step) of the points of a metric after step ``since``; a value that was NaN is NaN.

        Raises:
            DataError: no such metric, or no such axis.
        """
        values, across, steps = self.values(name), self.axis(x, samples_per_step), self.steps()
        is_shown = (steps > since) & (~np.isnan(values) | np.isin(np.arange(len(steps)), self._nulls.get(name, ())))
        return list(zip(across[is_shown].tolist(), values[is_shown].tolist(), steps[is_shown].tolist()))

    def curve(self, name: str, x: str, since: float, samples_per_step: int | None) -> JsonObject:
        """``x``, ``y`` and ``steps`` of `points`, at most `MOST_POINTS` of them.

        Raises:
            DataError: no such metric, or no such axis.
        """
        points = self.points(name, x, since, samples_per_step)
        places = thinned(np.array([value for _, value, _ in points]))
        made: dict[str, object] = {key: [points[i][n] for i in places] for n, key in enumerate(("x", "y", "steps"))}
        return {**made, "thinned": True} if len(places) < len(points) else made

    def groups(self) -> list[JsonObject]:
        """The metrics by topic: those of the console's table first, then by the first part of their names."""
        left = dict.fromkeys(sorted(self._columns))
        groups: dict[str, list[str]] = {topic: [] for topic in [*(topic for topic, _ in ROWS), "validation"]}
        for topic, entries in ROWS:
            shown = [name for name, _ in entries if name in left]
            groups[topic] += shown
            for name in shown:
                del left[name]
        for name in left:
            topic = "validation" if name.startswith(VALIDATION) else name.partition("/")[0]
            groups.setdefault(topic, []).append(name)
        return [{"name": topic, "metrics": names} for topic, names in groups.items() if names]


def thinned(values: np.ndarray) -> np.ndarray:
    """Places (K,) of at most `MOST_POINTS` values: both ends; of each bucket the smallest, the largest and a NaN."""
    if len(values) <= MOST_POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (MOST_POINTS - 2) // 3 + 1).astype(int)
    places = {0, len(values) - 1}
    for begin, end in pairwise(edges.tolist()):
        bucket = values[begin:end]
        is_nan = np.isnan(bucket)
        if not is_nan.all():
            places |= {begin + int(np.nanargmin(bucket)), begin + int(np.nanargmax(bucket))}
        if is_nan.any():
            places.add(begin + int(np.argmax(is_nan)))
    return np.array(sorted(places), dtype=np.int64)
