"""Progress in a notebook: one table that updates and the curves so far, in the place of lines that scroll by."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from verl.observability.tracker import Sample, Tracker, scalar_metrics

SHOWN = (
    "critic/score/mean", "train/loss", "val/loss", "response_length/mean", "actor/entropy", "actor/grad_norm",
    "timing_s/step",
)  # fmt: skip
"""Columns of the table, as far as a run has them; validation comes behind."""
LAST = 12
"""Steps that the table shows."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookTracker(Tracker):
    """A table of the last steps, in the output of the cell."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        self._rows: dict[int, dict[str, float]] = {}
        self._total, self._display = 0, None

    def start(self, total_steps: int, first_step: int = 0) -> None:
        self._total = total_steps

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._rows.setdefault(step, {}).update(scalar_metrics(data))
        self._show(self._table())

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        """Samples are in the run's folder; here they would push the table away."""

    def _show(self, text: str) -> None:
        from IPython.display import HTML, display

        if self._display is None:
            self._display = display(HTML(text), display_id=True)
        else:
            self._display.update(HTML(text))

    def _table(self) -> str:
        logged = {key for row in self._rows.values() for key in row}
        columns = [key for key in SHOWN if key in logged] + sorted(key for key in logged if key.startswith("val-core/"))
        head = "".join(f"<th>{html.escape(key)}</th>" for key in ("step", *columns))
        lines = [self._line(step, columns) for step in sorted(self._rows)[-LAST:]]
        title = html.escape(f"{self.experiment_name}: step {max(self._rows)} of {self._total}")
        return f"<b>{title}</b><table><tr>{head}</tr>{''.join(lines)}</table>{self._curve()}"

    def _line(self, step: int, columns: Sequence[str]) -> str:
        row = self._rows[step]
        cells = "".join(f"<td>{row[key]:.4g}</td>" if key in row else "<td></td>" for key in columns)
        return f"<tr><td>{step}</td>{cells}</tr>"

    def _curve(self) -> str:
        """The first metric of the table over the steps, as a line of SVG."""
        key = next((key for key in SHOWN if sum(key in row for row in self._rows.values()) > 1), None)
        if key is None:
            return ""
        points = [(step, row[key]) for step, row in sorted(self._rows.items()) if key in row]
        low, high = min(y for _, y in points), max(y for _, y in points)
        first, last = points[0][0], points[-1][0]
        across = [400 * (x - first) / max(last - first, 1) for x, _ in points]
        down = [80 - 70 * (y - low) / ((high - low) or 1.0) for _, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down))
        return (
            f'<div>{html.escape(key)}: {low:.4g} to {high:.4g}</div><svg width="420" height="90" viewBox="-5 0 410 90">'
            f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
        )
