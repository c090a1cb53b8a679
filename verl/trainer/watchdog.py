"""Ends a run in which nothing happens any more (``trainer.hang_seconds``), and says who waits for whom.

Progress is a stage that begins or ends, or an update of a mini-batch; while samples are waited for also a token that is
drawn, or a request that is answered. Where a thread inside a stage has made none for too long, the stacks of all
processes of the run go to a file, the processes at fault are named, and the run ends with an error. What does not end
then, because native code or a lock holds it, is ended after `GRACE_SECONDS`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from verl import stacks
from verl.errors import WorkerError, printable
from verl.journal.gantt import WAITING, role_of
from verl.journal.places import HANG, file_of_run
from verl.journal.spans import Activity, Spans, now
from verl.terminal import tell
from verl.trainer.signals import Hung, kill_descendants

KEY = "trainer.hang_seconds"
SIGNAL = stacks.SIGNAL + 1
GRACE_SECONDS = 30.0
LOOKS = 8
"""How often it looks within the limit."""
SCORER, SCORING, CALLED = "the reward function's process", "in invoke", "in perform"
"""The name of a process that scores; frames of one that does, and of a worker that runs a call."""


class Watchdog:
    """Watches a run while its block runs.

    Args:
        spans: the stages of the run.
        seconds: without progress; None: it does nothing.
        folder: of the run, for the report.
        workers: looks at the run's processes in other process trees or on other nodes, by group.
        is_mending: whether a part of the run that hangs is being replaced; the run is waited for meanwhile.

    Example:
        >>> with Watchdog(state.spans, 600.0, folder, lambda: []): train()
    """

    def __init__(
        self,
        spans: Spans,
        seconds: float | None,
        folder: Path,
        workers: Callable[[], Iterable[stacks.Process]],
        is_mending: Callable[[], bool] = lambda: False,
    ):
        self._spans, self._seconds, self._folder, self._workers = spans, seconds, folder, workers
        self._is_mending = is_mending
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._main: int | None = None
        self._before: Any = None
        self._error: WorkerError | None = None

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            stacks.listen()
            if threading.current_thread() is threading.main_thread():
                self._main, self._before = threading.get_ident(), signal.signal(SIGNAL, self._interrupt)
            self._thread = threading.Thread(target=self._watch, name="verl-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._main is not None:
            signal.signal(SIGNAL, signal.SIG_DFL if self._before is None else self._before)
        if self._error is not None:
            raise self._error from (None if isinstance(error, Hung) else error)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None and not self._over.is_set():
            raise Hung

    def _watch(self) -> None:
        assert self._seconds is not None, "the thread is started with a limit"
        while not self._over.wait(self._seconds / LOOKS):
            if self._is_mending():
                self._spans.progress_of_all()
            hanging = hanging_threads(self._spans.open(), self._seconds)
            if hanging and not self._samplers_go_on(hanging, self._seconds):
                self._error = self._error_of(hanging)
                self._end()
                return

    def _samplers_go_on(self, waiting: list[Activity], seconds: float) -> bool:
        """Whether these threads wait for samples alone, and a process of the run has not been silent for so long."""
        if not all(_waits_for_samples(activity.stages[-1].stage) for activity in waiting):
            return False
        try:
            silent = [stacks.silence_of(os.getpid()), *(worker.silent for worker in self._workers())]
        except Exception:  # boundary: the report says that the processes cannot be looked at
            return False
        last = min((pause for pause in silent if pause is not None), default=seconds)
        for activity in waiting:
            self._spans.progress(activity.ident, seconds_ago=last)
        return last < seconds

    def _end(self) -> None:
        """Raise in the main thread; where that does not end it, leave at once."""
        if self._main is not None:
            signal.pthread_kill(self._main, SIGNAL)
        if not self._over.wait(GRACE_SECONDS):
            tell(f"error: {self._error}\nIt had to be killed; finished checkpoints are untouched")
            try:
                kill_descendants()
            finally:
                os._exit(2)

    def _error_of(self, hanging: list[Activity]) -> WorkerError:
        try:
            return self._report(hanging)
        except Exception as error:  # boundary: whatever is broken in the processes, the run has to end
            top = hanging[0]
            return WorkerError(
                f"nothing has happened for {now() - top.progress:.1f} seconds in stage {top.stages[-1].stage} of step "
                f"{top.stages[-1].step}. Who hangs could not be seen: {type(error).__name__}: {error}",
                key=KEY,
                got=self._seconds,
            )

    def _report(self, hanging: list[Activity]) -> WorkerError:
        others = list({(worker.node, worker.pid): worker for worker in self._workers()}.values())
        worker_pids = {worker.pid for worker in others if not worker.node}
        descendants = [process.pid for process in psutil.Process().children(recursive=True)]
        here = [pid for pid in (os.getpid(), *descendants) if pid not in worker_pids]
        seen = [*stacks.look_at(here, {os.getpid(): "the controller"}), *others]
        waits = [wait_of(activity, seen) for activity in hanging]
        shown = [process for process in seen if process.stacks or process.is_stuck]
        parts = ["\n".join(waits), *(f"{p}\n{p.stacks or '(no stack: it does not answer)'}" for p in shown)]
        parts.append(f"{len(seen) - len(shown)} further processes keep no stacks, such as Ray's own")
        where = "its stacks could not be written"
        try:
            path = file_of_run(self._folder / HANG)
            path.write_text(printable("\n\n".join(parts)) + "\n", encoding="utf-8")
            where = f"{path} has the stacks of {len(shown)} processes"
        except OSError as error:
            where += f": {error.strerror}"
        return WorkerError(
            f"nothing has happened for {now() - hanging[0].progress:.1f} seconds. {'. '.join(waits)}",
            key=KEY,
            got=self._seconds,
            fix=f"{printable(where)}. If the stage only takes that long, raise {KEY}.",
        )


def _waits_for_samples(stage: str) -> bool:
    return stage == "wait_for_samples" or role_of(stage) in ("sampling", "validation")


def hanging_threads(active: list[Activity], seconds: float) -> list[Activity]:
    """The threads that made no progress for too long, the longest first; one that waits for another is not at fault."""
    late = sorted((a for a in active if now() - a.progress > seconds), key=lambda a: a.progress)
    busy = [activity for activity in late if not activity.stages[-1].stage.startswith(WAITING)]
    return busy or (late if len(late) == len(active) else [])


def wait_of(activity: Activity, seen: list[stacks.Process]) -> str:
    """Who waits for whom: a thread of the controller, its stage, and the processes at fault."""
    innermost = activity.stages[-1]
    role = role_of(innermost.stage) or "the controller"
    blamed = [process for process in seen if process.is_stuck and process.name]
    if role == "scoring" and not blamed:
        blamed = [process for process in seen if process.name == SCORER and SCORING in process.stacks]
    if not blamed:
        blamed = [process for process in seen if CALLED in process.stacks]
    who = " and ".join(map(str, blamed)) or "the controller itself"
    return f"{innermost.thread} is in stage {innermost.stage} of step {innermost.step} ({role}) and waits for {who}"
