"""Who worked when: ``python -m verl.journal.gantt RUN -o gantt.svg [--steps 2-5]`` draws a run's trace.

A row per role, time from left to right, and a shade per step, so that sampling for step k + 1 during the training of
step k is seen as such. It also prints for how many seconds each role was idle. ``--chrome trace.json`` writes the spans
of each thread as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from verl.errors import DataError, print_answer
from verl.journal.spans import Span, read_spans

ROLES = {
    "sampling": ("gen", "gen_max"),
    "scoring": ("reward",),
    "log-probs": ("old_log_prob", "ref", "values"),
    "training": ("update_actor", "update_critic", "update_ref"),
    "weight sync": ("update_weights", "wait_for_weights"),
    "checkpoint": ("save_checkpoint",),
    "validation": ("testing",),
}
"""The stages of each role; those of no role are the controller's own, and `AROUND` and waiting are no work."""
REST, AROUND, WAITING = "controller", ("step",), "wait"
COLORS = {
    "sampling": ("#4c9f70", "#86c5a0"),
    "scoring": ("#c98b2b", "#e5bd7a"), "log-probs": ("#7c6bb0", "#aea2d6"),
    "training": ("#3f74b5", "#82aadb"), "weight sync": ("#b5504f", "#dd908f"), "checkpoint": ("#6b7785", "#a3adb8"),
    "validation": ("#2f8f9d", "#7cc3cd"), "controller": ("#8a7f6b", "#bdb39f"),
}  # fmt: skip
WIDTH, LABEL, ROW, TOP, BAR = 1000, 96, 30, 34, 20
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def role_of(stage: str) -> str | None:
    """The role that works in a stage; None where nobody does."""
    for role, stages in ROLES.items():
        if stage in stages:
            return role
    return None if stage in AROUND or stage.startswith(WAITING) else REST


def by_role(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each role that has any, in the order of `ROLES`."""
    rows: dict[str, list[Span]] = {role: [] for role in (*ROLES, REST)}
    for span in spans:
        role = role_of(span.stage)
        if role is not None:
            rows[role].append(span)
    return {role: work for role, work in rows.items() if work}


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda interval: interval.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


def of_steps(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """Everything in flight while these steps ran; the latest run of each step where a resumed run repeated it.

    Raises:
        DataError: none of them is in the trace.
    """
    frames = {span.step: span for span in spans if span.stage in AROUND and first <= span.step <= last}
    if not frames:
        steps = sorted({span.step for span in spans if span.stage in AROUND})
        allowed = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise DataError("none of these steps is in the trace", key="--steps", got=f"{first}-{last}", allowed=allowed)
    begin, end = min(span.begin for span in frames.values()), max(span.end for span in frames.values())
    inside = (span for span in spans if span.end > begin and span.begin < end)
    return [replace(span, begin=max(begin, span.begin), end=min(end, span.end)) for span in inside]


def running_seconds(spans: Iterable[Span]) -> float:
    """Seconds in which a process of the run was there: between two processes of a resumed run nobody is idle."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in spans:
        begins[span.process] = min(span.begin, begins.get(span.process, span.begin))
        ends[span.process] = max(span.end, ends.get(span.process, span.end))
    down = sum(max(0.0, begins[after] - ends[before]) for before, after in pairwise(sorted(begins)))
    return max(ends.values()) - min(begins.values()) - down


def work_of_roles(spans: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """(busy, idle) seconds of each role."""
    length = running_seconds(spans)
    busy = {role: busy_seconds(work) for role, work in by_role(spans).items()}
    return {role: (seconds, length - seconds) for role, seconds in busy.items()}


def idle_table(spans: Sequence[Span]) -> str:
    """Busy and idle seconds of each role."""
    length = running_seconds(spans)
    lines = [f"{'role':<12}{'busy s':>10}{'idle s':>10}{'idle':>8}"]
    for role, (busy, idle) in work_of_roles(spans).items():
        lines.append(f"{role:<12}{busy:>10.3f}{idle:>10.3f}{idle / length:>8.1%}")
    return "\n".join([*lines, f"{'all':<12}{length:>10.3f} seconds"])


def trace_events(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans as Chrome's trace events: a row per thread, or more where its spans overlap without being nested.

    A viewer draws a row's spans within each other. Times are in microseconds since 1970; source: Chromium's "Trace
    Event Format", complete events (``X``) and names of rows (``M``).
    """
    rows: dict[tuple[int, str, int], list[Span]] = {}
    numbers: dict[tuple[int, str, int], int] = {}
    events = []
    for span in sorted(spans, key=lambda interval: (interval.begin, -interval.end)):
        row = next(key for n in count() if _fits(span, rows.setdefault(key := (span.process, span.thread, n), [])))
        rows[row].append(span)
        events.append(
            {"name": span.stage, "cat": role_of(span.stage) or "run", "ph": "X", "ts": span.begin * 1e6,
             "dur": (span.end - span.begin) * 1e6, "pid": span.process,
             "tid": numbers.setdefault(row, len(numbers) + 1), "args": {"step": span.step}}
        )  # fmt: skip
    about = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": number,
         "args": {"name": thread if n == 0 else f"{thread} ({n + 1})"}}
        for (process, thread, n), number in numbers.items()
    ]  # fmt: skip
    return {"traceEvents": about + events, "displayTimeUnit": "ms"}


def _fits(span: Span, around: list[Span]) -> bool:
    """Whether a row has room for a span; takes those from ``around``, its open spans, that ended before it begins."""
    while around and around[-1].end <= span.begin:
        around.pop()
    return not around or span.end <= around[-1].end


def draw_gantt(spans: Sequence[Span], title: str) -> str:
    """An SVG picture."""
    rows = by_role(spans)
    begin, length = min(s.begin for s in spans), max(s.end for s in spans) - min(s.begin for s in spans)
    scale, height = (WIDTH - LABEL - 12) / length, TOP + ROW * len(rows) + 26
    parts = [f'<text x="{LABEL}" y="18" font-weight="bold">{escape(title)}</text>']
    tick = next((step for step in TICKS if length / step <= 12), TICKS[-1])
    for number in range(int(length / tick) + 1):
        x = LABEL + number * tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 22}" stroke="#d9dee5"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{number * tick:g} s</text>')
    for place, (role, work) in enumerate(rows.items()):
        y = TOP + ROW * place
        parts.append(f'<text x="{LABEL - 8}" y="{y + 14}" text-anchor="end">{role}</text>')
        for span in work:
            x, width = LABEL + (span.begin - begin) * scale, max(0.6, (span.end - span.begin) * scale)
            tooltip = escape(f"step {span.step}: {span.stage}, {span.end - span.begin:.3f} s, thread {span.thread}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{COLORS[role][span.step % 2]}">'
                f"<title>{tooltip}</title></rect>"
            )
            if width > 9 * len(str(span.step)) + 4:
                middle = x + width / 2
                parts.append(f'<text x="{middle:.1f}" y="{y + 14}" text-anchor="middle" fill="#fff">{span.step}</text>')
    style = "font-family: DejaVu Sans, sans-serif; font-size: 11px"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" style="{style}" fill="#1f2a36">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (trainer.default_local_dir), or its trace")
    parser.add_argument("-o", "--out", type=Path, default=None, help="the SVG to write; none: only the table")
    parser.add_argument("--chrome", type=Path, default=None, metavar="FILE", help="trace events for Perfetto, as JSON")
    parser.add_argument("--steps", default=None, help="first and last step, as 2-5; all by default")
    parser.add_argument("--title", default=None, help="over the picture; the run's folder by default")
    args = parser.parse_args(argv)
    return print_answer(lambda: _answer(args))


def _answer(args: argparse.Namespace) -> str:
    spans = read_spans(args.run)
    if args.steps is not None:
        spans = of_steps(spans, *_steps(args.steps))
    files = [args.out, args.chrome]
    if args.out is not None:
        args.out.write_text(draw_gantt(spans, args.title or str(args.run)), encoding="utf-8")
    if args.chrome is not None:
        args.chrome.write_text(json.dumps(trace_events(spans)), encoding="utf-8")
    return "\n".join([idle_table(spans), *(str(file) for file in files if file is not None)])


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise DataError("not two steps", key="--steps", got=text, allowed="2-5, or 3 for one step")
    return int(first), int(last or first)


if __name__ == "__main__":
    sys.exit(main())
