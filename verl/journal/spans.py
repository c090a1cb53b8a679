"""When each stage of a run began and ended, by thread: what a Gantt chart is drawn from, and what a watchdog looks at.

A schedule may sample for one step in a thread of its own while another thread trains the step before; each enters its
stages here through `StepContext.timed`. Times are seconds since 1970, measured on a monotonic clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.journal.file import NAME, RUN, Entry, Journal, entries_in, journal_in
from verl.metrics import notice

KEY, EVENT = "trainer.trace", "span"
_START = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970."""
    return _START + time.perf_counter()


@dataclass(frozen=True)
class Span:
    """One stage of one step in one thread; times in seconds since 1970.

    Args:
        process: of the run: 0, and one more each time that it was resumed.
    """

    stage: str
    step: int
    thread: str
    begin: float
    end: float = 0.0
    process: int = 0


@dataclass
class Activity:
    """A thread of the controller that is inside of stages, the outermost first.

    Args:
        progress: when it last entered or left one, or reported progress.
    """

    ident: int
    stages: list[Span]
    progress: float


class Spans:
    """The stages of a run, finished ones and open ones.

    Example:
        >>> spans = Spans(); spans.record_in(journal)
        >>> with spans.span("gen", step=3): generate()
        >>> spans.flush()
    """

    def __init__(self) -> None:
        # Callers are the controller's threads, which enter and leave stages, and the watchdog's, which looks.
        self._lock = threading.Lock()
        self._open: dict[int, Activity] = {}
        self._done: list[Span] = []
        self._journal: Journal | None = None

    @contextmanager
    def span(self, stage: str, step: int) -> Iterator[None]:
        """A stage begins, and ends with the block."""
        span = self._enter(stage, step)
        try:
            yield
        finally:
            self._leave(span)

    @contextmanager
    def on_lane(self, stage: str, step: int, lane: str) -> Iterator[None]:
        """As `span`, of work that shares its thread with other work: ``lane`` is its name, and `open` has it not."""
        begin = now()
        try:
            yield
        finally:
            with self._lock:
                if self._journal is not None:
                    self._done.append(Span(stage, step, lane, begin, now()))

    def _enter(self, stage: str, step: int) -> Span:
        ident, span = threading.get_ident(), Span(stage, step, threading.current_thread().name, now())
        with self._lock:
            activity = self._open.setdefault(ident, Activity(ident, [], span.begin))
            activity.stages.append(span)
            activity.progress = span.begin
        return span

    def _leave(self, span: Span) -> None:
        ident = threading.get_ident()
        with self._lock:
            activity = self._open[ident]
            activity.stages.pop()
            activity.progress = end = now()
            if not activity.stages:
                del self._open[ident]
            if self._journal is not None:
                self._done.append(Span(span.stage, span.step, span.thread, span.begin, end))

    def progress(self, ident: int | None = None, seconds_ago: float = 0.0) -> None:
        """Report progress of a thread, the calling one by default, inside its stage, now or ``seconds_ago``."""
        with self._lock:
            activity = self._open.get(threading.get_ident() if ident is None else ident)
            if activity is not None:
                activity.progress = max(activity.progress, now() - seconds_ago)

    def progress_of_all(self) -> None:
        """As `progress`, of every thread: what they wait for makes progress."""
        with self._lock:
            for activity in self._open.values():
                activity.progress = now()

    def open(self) -> list[Activity]:
        """The threads that are inside of stages now."""
        with self._lock:
            return [Activity(a.ident, list(a.stages), a.progress) for a in self._open.values()]

    def record_in(self, journal: Journal) -> None:
        """Append finished stages to the journal of the run at every `flush`."""
        self._journal = journal

    def flush(self) -> None:
        """Write what has ended since; where it cannot be written, no more is recorded, with a notice."""
        with self._lock:
            journal, done, self._done = self._journal, self._done, []
        if journal is None:
            return
        try:
            journal.write(*map(_entry, done))
        except DataError as error:
            self._journal = None
            notice(KEY, f"no more is recorded: {error.message}")


def read_spans(place: Path) -> list[Span]:
    """The spans of a journal, or of the newest one in a run's folder, by their beginnings; repeated steps are included.

    Raises:
        DataError: there is no such file, it is damaged, or it has no span.
    """
    path = journal_in(place, "spans")
    if path is not None and path.name.startswith("trace"):
        raise DataError("a trace of an earlier release is not read", got=str(path), fix=f"Name the {NAME} of a run, or "
                        "draw it with the release that wrote it.")  # fmt: skip
    if path is None:
        raise DataError("there is no journal", got=str(place), fix=f"{KEY}=true writes spans into {NAME} in "
                        "trainer.default_local_dir.")  # fmt: skip
    spans, process = [], 0
    for number, entry in enumerate(entries_in(path, replaced=True), start=1):
        try:
            process += is_resumed(entry)
            if entry["event"] == EVENT:
                spans.append(span_of(entry, process))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"line {number} is no span", got=str(path)) from error
    if not spans:
        raise DataError("the journal has no span", got=str(path), fix=f"{KEY}=true records them.")
    return sorted(spans, key=lambda span: (span.begin, -span.end))


def is_resumed(entry: Entry) -> bool:
    """Whether the run was resumed here: an entry with a check begins a segment, not a process.

    Raises:
        TypeError, ValueError: the entry is damaged.
    """
    return entry["event"] == RUN and "check" not in entry and int(entry.get("step", 0)) > 0


def span_of(entry: Entry, process: int) -> Span:
    """The span that an entry records.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    times = float(entry["begin"]), float(entry["end"])
    return Span(str(entry["stage"]), int(entry["step"]), str(entry["thread"]), *times, process)


def _entry(span: Span) -> dict[str, Any]:
    times = {"begin": round(span.begin, 6), "end": round(span.end, 6)}
    return {"event": EVENT, "step": span.step, "stage": span.stage, "thread": span.thread, **times}
