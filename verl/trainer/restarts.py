"""Starts a run again that ended too early (``trainer.max_restarts``).

An attempt is a fork of this process, which has computed nothing yet: it continues the program, while this process waits
and then ends as the last attempt did. Each attempt continues from the newest checkpoint.

Consumes: the end of an attempt; signals, which the attempt gets. Waits for: these, and the pause before the next
attempt. Unblocked by: the kernel, which reports the end of a child even if it was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from verl import lifeline
from verl.errors import ConfigError, DataError, MissingDependencyError, ModelError, ReplayError
from verl.json_text import JsonObject, read_json
from verl.observability.backends.notebook import in_notebook
from verl.terminal import tell
from verl.trainer.signals import SIGNALS

KEY = "trainer.max_restarts"
LASTING = (ConfigError, DataError, ModelError, MissingDependencyError, ReplayError)
"""Errors that no restart mends."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the next attempt; they double as long as attempts end without a new checkpoint."""
REPORT_CHARACTERS = 2000
TRACKER = "latest_checkpointed_iteration.txt"


class EndReport:
    """In an attempt: reports to the process that waits why the run ended. One that was killed reports nothing.

    Args:
        writer: file descriptor of a pipe.
    """

    def __init__(self, writer: int):
        self._writer = writer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "" if error is None else f"{type(error).__name__}: {error}"[:REPORT_CHARACTERS]
        report = {"is_complete": error is None, "is_lasting": isinstance(error, LASTING), "reason": reason}
        with suppress(BrokenPipeError):  # the process that waits was killed
            os.write(self._writer, json.dumps(report).encode())


@dataclass(frozen=True)
class RunAttempt:
    """One attempt that has ended.

    Args:
        status: exit status, as a shell has it.
        reason: for the user.
        is_final: the run is complete, a signal ended it in order, or its error would come again.
        is_error: an exception ended it.
        first, last: steps of the newest checkpoint at its begin and its end.
        seconds: that it lasted.
    """

    status: int
    reason: str
    is_final: bool
    is_error: bool
    first: int
    last: int
    seconds: float

    def __str__(self) -> str:
        return f"from step {self.first} to {self.last} in {self.seconds:.0f} s: {self.reason}"


def begin_attempts(folder: Path, max_restarts: int) -> EndReport:
    """Fork attempts until the run is complete; returns in each of them.

    Args:
        folder: ``trainer.default_local_dir``.
        max_restarts: attempts after the first one.

    Raises:
        ConfigError: a notebook, whose kernel cannot be forked, or no Linux.
        SystemExit: in the process that waits, with the status of the last attempt.
    """
    if in_notebook() or sys.platform != "linux":
        where = "a notebook" if in_notebook() else sys.platform
        raise ConfigError("a run restarts as a program on Linux", key=KEY, got=where, fix=f"Set {KEY}=0.")
    lifeline.adopt_orphans()  # what a killed attempt leaves behind ends before the next one begins
    earlier = frozenset(lifeline.children())
    signals = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}  # nohup ignores SIGHUP
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*signals, signal.SIGCHLD})
    attempts: list[RunAttempt] = []
    while True:
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        waiting, first, began = os.getpid(), _step(folder), time.monotonic()
        child = os.fork()
        if not child:
            os.close(reader)
            _join(waiting, mask)
            return EndReport(writer)
        os.close(writer)
        status = _wait(child, signals)
        attempts.append(attempt_of(status, _report(reader), first, _step(folder), time.monotonic() - began))
        lifeline.end_leftovers(earlier, tell)
        if is_last(attempts, max_restarts):
            break
        pause = pause_before(attempts)
        tell(f"{KEY}: attempt {len(attempts)} ended, {attempts[-1]}; the next one begins in {pause:.0f} s")
        stop = signal.sigtimedwait(signals, pause)
        if stop is not None:
            raise SystemExit(128 + stop.si_signo)
    if len(attempts) > 1 or not attempts[-1].is_final:
        lines = "".join(f"\n  attempt {number}, {attempt}" for number, attempt in enumerate(attempts, 1))
        tell(f"{KEY}={max_restarts}: {len(attempts)} attempts{lines}")
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    raise SystemExit(attempts[-1].status)


def attempt_of(status: int, report: JsonObject, first: int, last: int, seconds: float) -> RunAttempt:
    """An attempt from how its process ended and what it reported.

    Args:
        status: negative if a signal killed it.
        report: of `EndReport`; empty if it was killed.
    """
    stops = {code for number in SIGNALS for code in (-number, 128 + number)}
    is_complete, is_lasting = bool(report.get("is_complete")), bool(report.get("is_lasting"))
    if is_complete:
        reason = "complete"
    elif status < 0:
        reason = f"killed by {signal.Signals(-status).name}"
    else:
        reason = str(report.get("reason") or f"ended with status {status} without an error")
    is_final = is_complete or is_lasting or status in stops
    code = status if status >= 0 else 128 - status
    if not is_complete and not code:
        code = 1  # os._exit(0) in a user's code does not complete a run
    return RunAttempt(code, reason, is_final, bool(report.get("reason")), first, last, seconds)


def is_last(attempts: Sequence[RunAttempt], max_restarts: int) -> bool:
    """Whether no attempt follows: all are used, or the last one ended for good.

    An error that comes twice in a row at one checkpoint is a mistake that a restart does not mend.
    """
    last, former = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    is_repeated = last.is_error and former is not None and (last.reason, last.last) == (former.reason, former.last)
    return last.is_final or len(attempts) > max_restarts or is_repeated


def pause_before(attempts: Sequence[RunAttempt]) -> float:
    """Seconds before the next attempt: twice as long for each one in a row that made no checkpoint."""
    barren = 0
    for attempt in reversed(attempts):
        if attempt.last > attempt.first:
            break
        barren += 1
    return min(FIRST_PAUSE * 2 ** max(barren - 1, 0), LONGEST_PAUSE)


def _join(waiting: int, mask: Iterable[int]) -> None:
    """In an attempt: signals come through the process that waits, at whose death this one saves and ends."""
    os.setpgid(0, 0)  # a terminal would send Ctrl-C to both, and the second signal ends a run at once
    threading.Thread(target=_end_with, args=(waiting,), name="verl-waiting-process", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_with(waiting: int) -> None:
    lifeline.wait_for_end(waiting)  # PR_SET_PDEATHSIG comes again for each thread that the other process has
    os.kill(os.getpid(), signal.SIGTERM)


def _wait(child: int, signals: Iterable[int]) -> int:
    """Pass signals on until the child has ended; its status, negative if a signal killed it."""
    while True:
        number = signal.sigwait({*signals, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _report(reader: int) -> JsonObject:
    """What an attempt has reported; nothing if it was killed. Closes ``reader``."""
    os.set_blocking(reader, False)  # a process that the attempt left behind has the other end open
    try:
        text = os.read(reader, 1 << 16)
    except BlockingIOError:
        text = b""
    finally:
        os.close(reader)
    return read_json(text) if text else {}


def _step(folder: Path) -> int:
    """Of the newest checkpoint; 0 without one."""
    with suppress(OSError, ValueError):
        return int((folder / TRACKER).read_text(encoding="utf-8"))
    return 0
