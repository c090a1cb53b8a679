"""What the planner prints, as a page of HTML with charts: one file that runs no script and loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from rich.table import Table

from verl.journal.spans import Span
from verl.planner.estimate import USABLE, Estimate
from verl.planner.ranges import Range
from verl.planner.space import ASYNC, PlacementPlan

WIDTH, LABEL, ROW, BAR, MARGIN = 1000, 290, 24, 16, 110
"""Of a chart, in pixels: all of it, the labels of its bars, a line, a bar, and what is behind the longest bar."""
SHADES = ("#3f74b5", "#c98b2b", "#4c9f70", "#b5504f", "#7c6bb0", "#2f8f9d", "#8a7f6b")
TICKS = 10
STYLE = """
body { font: 14px/1.5 "DejaVu Sans", sans-serif; color: #1f2a36; max-width: 1060px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 2em; font-size: 13px }
caption { text-align: left; font-weight: bold; padding: 4px 0 }
th, td { padding: 3px 10px; border-bottom: 1px solid #d9dee5; text-align: left }
.right { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f3f5f8; padding: 10px; overflow-x: auto } svg { width: 100%; margin: 1em 0 }
"""
PLANNED_STEPS = 3
"""Of a Gantt chart: steps one ahead overlap from the second on."""


@dataclass(frozen=True)
class Bar:
    """A line of a chart.

    Args:
        label: of the line.
        parts: name -> amount, drawn one behind the other.
        range: lowest and highest total, where they are known.
        note: behind the bar; the total by default.
    """

    label: str
    parts: dict[str, float]
    range: tuple[float, float] | None = None
    note: str = ""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PlanReport:
    """A page.

    Args:
        command: that made it.
        text: what is printed below the tables.
        tables: as on the terminal.
        charts: SVG.
    """

    command: str
    text: str
    tables: Sequence[Table] = ()
    charts: Sequence[str] = field(default=())

    def html(self) -> str:
        """The file's content."""
        parts = [f"<pre>{escape(self.command)}</pre>", *self.charts, *map(_table, self.tables)]
        head = (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.command[:80])}</title>'
        )
        body = "\n".join([*parts, f"<pre>{escape(self.text)}</pre>"])
        return f"{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"


def memory_chart(estimate: Estimate) -> str:
    """GB per device of every role and phase, by term."""
    bars = [
        Bar(f"{memory.role}, {phase.phase}", {name: amount / 1e9 for name, amount in phase.terms.items()})
        for memory in estimate.memory
        for phase in memory.phases
    ]
    device = estimate.cluster.device
    limit = f"{USABLE:.0%} of {device.name}", USABLE * device.memory / 1e9
    return bar_chart("GB per device; roles that share a pool add up, see the peaks", bars, limit)


def seconds_chart(title: str, seconds: Sequence[tuple[str, Range]]) -> str:
    """Likely seconds, with their ranges."""
    return bar_chart(title, [Bar(name, {"likely": part.likely}, (part.low, part.high)) for name, part in seconds])


def placements_chart(placements: Sequence[tuple[str, PlacementPlan]], stages: Sequence[str]) -> str:
    """Seconds of the stages of a step; asynchronous ones run generation next to the others."""
    bars = [
        Bar(title, dict(zip(stages, plan.stages, strict=True)), note=f"{plan.seconds:.3g} s a step")
        for title, plan in placements
    ]
    return bar_chart("Seconds of the stages of a step", bars)


def planned_spans(plan: PlacementPlan) -> list[Span]:
    """Three steps of a plan, for `verl.journal.gantt.draw_gantt`."""
    generation, preparation, training = plan.stages
    is_ahead = plan.schedule == ASYNC
    spans, sampled, trained = [], 0.0, 0.0
    for step in range(1, PLANNED_STEPS + 1):
        begin = sampled if is_ahead else trained
        ready = begin + generation
        prepared = max(ready, trained) + preparation
        stages = [("gen", begin, ready), ("ref", prepared - preparation, prepared),
                  ("update_actor", prepared, prepared + training)]  # fmt: skip
        spans += [Span(stage, step, "plan", start, end) for stage, start, end in stages if end > start]
        # One step ahead: the next generation begins when the trainers take this one.
        sampled, trained = max(ready, trained), prepared + training
    return spans


def bar_chart(title: str, bars: Sequence[Bar], limit: tuple[str, float] | None = None) -> str:
    """Horizontal bars, as SVG.

    Args:
        limit: a line across all bars: its name, and where it is.
    """
    ends = [max(bar.total, *(bar.range or ())) if bar.range else bar.total for bar in bars]
    most = max([*ends, *([limit[1]] if limit else [])]) or 1.0
    scale, top = (WIDTH - LABEL - MARGIN) / most, 58
    names = list(dict.fromkeys(name for bar in bars for name, amount in bar.parts.items() if amount))
    shades = {name: SHADES[number % len(SHADES)] for number, name in enumerate(names)}
    bottom = top + ROW * len(bars)
    lines = [
        f'<text x="0" y="16" font-weight="bold">{escape(title)}</text>',
        *(_legend(shades) if len(shades) > 1 else ()),
    ]
    for tick in _ticks(most):
        x = LABEL + tick * scale
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom}" stroke="#d9dee5"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for number, bar in enumerate(bars):
        lines += _bar(bar, top + ROW * number, scale, shades)
    if limit:
        x = LABEL + limit[1] * scale
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom}" stroke="#b5504f" '
                     'stroke-width="2" stroke-dasharray="5 3"/>')  # fmt: skip
        lines.append(f'<text x="{x:.1f}" y="{top - 10}" text-anchor="end" fill="#b5504f">{escape(limit[0])}</text>')
    style = "font-family: DejaVu Sans, sans-serif; font-size: 11px"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" style="{style}" fill="#1f2a36">'
    )
    return "\n".join([head, *lines, "</svg>"])


def _bar(bar: Bar, y: float, scale: float, shades: dict[str, str]) -> Iterator[str]:
    yield f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(bar.label)}</text>'
    x = float(LABEL)
    for name, amount in bar.parts.items():
        if amount:
            tooltip = escape(f"{bar.label}: {name.replace('_', ' ')} {amount:.3g}")
            yield (f'<rect x="{x:.2f}" y="{y}" width="{amount * scale:.2f}" height="{BAR}" fill="{shades[name]}">'
                   f"<title>{tooltip}</title></rect>")  # fmt: skip
        x += amount * scale
    if bar.range:
        low, high = (LABEL + end * scale for end in bar.range)
        ends = "".join(f"M{end:.2f} {y + 4}v{BAR - 8}" for end in (low, high))
        yield f'<path d="M{low:.2f} {y + BAR / 2}H{high:.2f}{ends}" stroke="#1f2a36" fill="none"/>'
        x = max(x, high)
    yield f'<text x="{x + 5:.1f}" y="{y + 12}">{escape(bar.note or f"{bar.total:.3g}")}</text>'


def _legend(shades: dict[str, str]) -> Iterator[str]:
    x = LABEL
    for name, shade in shades.items():
        yield f'<rect x="{x}" y="26" width="10" height="10" fill="{shade}"/>'
        yield f'<text x="{x + 14}" y="35">{escape(name.replace("_", " "))}</text>'
        x += 32 + 7 * len(name)


def _ticks(most: float) -> list[float]:
    """At most `TICKS` round numbers up to ``most``."""
    power = 10 ** math.floor(math.log10(most / TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= TICKS)
    return [number * step for number in range(int(most / step) + 1)]


def _table(table: Table) -> str:
    sides = [' class="right"' if column.justify == "right" else "" for column in table.columns]
    heads = [f"<th{side}>{escape(str(column.header))}</th>" for side, column in zip(sides, table.columns, strict=True)]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    cells = [
        "".join(f"<td{side}>{escape(str(cell))}</td>" for side, cell in zip(sides, row, strict=True)) for row in rows
    ]
    body = "\n".join(f"<tr>{line}</tr>" for line in ("".join(heads), *cells))
    return f"<table><caption>{escape(str(table.title))}</caption>\n{body}\n</table>"
