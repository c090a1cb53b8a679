"""When each stage of a run began and ended, by thread: what a Gantt chart is drawn from, and what a watchdog looks at.

A schedule may sample for one step in a thread of its own while another thread trains the step before; each enters its
stages here through `StepContext.timed`. Times are seconds since 1970, measured on the clock that never goes back.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.json_text import read_json
from verl.metrics import notice
from verl.observability.places import file_of_run, newest_file

KEY, NAME = "trainer.trace", "trace.jsonl"
LONGEST_LINE = 1 << 16  # bytes, far more than a line has
_START = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970."""
    return _START + time.perf_counter()


@dataclass(frozen=True)
class Span:
    """One stage of one step in one thread; times in seconds since 1970."""

    stage: str
    step: int
    thread: str
    begin: float
    end: float = 0.0


@dataclass
class Activity:
    """A thread of the controller that is inside of stages, the outermost first.

    Args:
        progress: when it last entered or left one, or said that it goes on.
    """

    ident: int
    stages: list[Span]
    progress: float


class Spans:
    """The stages of a run, finished ones and open ones.

    Example:
        >>> spans = Spans(); spans.record_in(folder)
        >>> with spans.span("gen", step=3): generate()
        >>> spans.flush()
    """

    def __init__(self) -> None:
        # Callers are the controller's threads, which enter and leave stages, and the watchdog's, which looks.
        self._lock = threading.Lock()
        self._open: dict[int, Activity] = {}
        self._done: list[Span] = []
        self._path: Path | None = None

    @contextmanager
    def span(self, stage: str, step: int) -> Iterator[None]:
        """A stage begins, and ends with the block."""
        one = self._enter(stage, step)
        try:
            yield
        finally:
            self._leave(one)

    @contextmanager
    def apart(self, stage: str, step: int, lane: str) -> Iterator[None]:
        """As `span`, of work that shares its thread with other work: ``lane`` is its name, and `open` has it not."""
        begin = now()
        try:
            yield
        finally:
            with self._lock:
                if self._path is not None:
                    self._done.append(Span(stage, step, lane, begin, now()))

    def _enter(self, stage: str, step: int) -> Span:
        ident, one = threading.get_ident(), Span(stage, step, threading.current_thread().name, now())
        with self._lock:
            activity = self._open.setdefault(ident, Activity(ident, [], one.begin))
            activity.stages.append(one)
            activity.progress = one.begin
        return one

    def _leave(self, one: Span) -> None:
        ident = threading.get_ident()
        with self._lock:
            activity = self._open[ident]
            activity.stages.pop()
            activity.progress = end = now()
            if not activity.stages:
                del self._open[ident]
            if self._path is not None:
                self._done.append(Span(one.stage, one.step, one.thread, one.begin, end))

    def progress(self, ident: int | None = None, seconds_ago: float = 0.0) -> None:
        """A thread, the calling one by default, goes on with the stage that it is in, or has done so a while ago."""
        with self._lock:
            activity = self._open.get(threading.get_ident() if ident is None else ident)
            if activity is not None:
                activity.progress = max(activity.progress, now() - seconds_ago)

    def progress_of_all(self) -> None:
        """As `progress`, of every thread: what they wait for goes on."""
        with self._lock:
            for activity in self._open.values():
                activity.progress = now()

    def open(self) -> list[Activity]:
        """The threads that are inside of stages now."""
        with self._lock:
            return [Activity(one.ident, list(one.stages), one.progress) for one in self._open.values()]

    def record_in(self, folder: Path, goes_on: bool = False, before: str | None = None) -> Path | None:
        """Append finished stages at every `flush` to a file of this run, which is returned; None: none can be written.

        Args:
            folder: the run's.
            goes_on: the run goes on, and so does its file.
            before: the name of that file, where the checkpoint knows it.
        """
        try:
            self._path = file_of_run(folder / NAME, goes_on, before)
            if self._path.is_file():
                _end_line(self._path)
        except OSError as error:
            self._give_up(folder / NAME, error)
        return self._path

    def flush(self) -> None:
        """Write what has ended since; a file that cannot be written is given up with a notice, the run goes on."""
        with self._lock:
            path, done, self._done = self._path, self._done, []
        if path is None or not done:
            return
        lines = "".join(json.dumps(_line(one)) + "\n" for one in done)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            self._give_up(path, error)

    def _give_up(self, path: Path, error: OSError) -> None:
        self._path = None
        notice(KEY, f"{path} cannot be written ({error.strerror}), so no more is recorded")


def read_spans(place: Path) -> list[Span]:
    """The spans of a file, or of the newest run in a folder, by their beginnings; a last line cut off is left out.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    path = newest_file(place / NAME) if place.is_dir() else place
    if path is None or not path.is_file():
        raise DataError("there is no trace", got=str(place), fix=f"{KEY}=true writes {NAME} into "
                        "trainer.default_local_dir.")  # fmt: skip
    spans, lines = [], path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            entry = read_json(line)
            times = float(entry["begin"]), float(entry["end"])
            spans.append(Span(str(entry["stage"]), int(entry["step"]), str(entry["thread"]), *times))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"line {number} is no span of a trace", got=str(path)) from error
    if not spans:
        raise DataError("the trace is empty", got=str(path))
    return sorted(spans, key=lambda one: (one.begin, -one.end))


def _end_line(path: Path) -> None:
    """Cut off half a line, which a run that was killed has left, before it goes on."""
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


def _line(one: Span) -> dict[str, Any]:
    times = {"begin": round(one.begin, 6), "end": round(one.end, 6)}
    return {"step": one.step, "stage": one.stage, "thread": one.thread, **times}
