"""Starts a run again that ended too early (``trainer.max_restarts``).

An attempt is a fork of this process, which has imported libraries and computed nothing: it continues the program, while
this process waits and then ends as the last attempt did. Each attempt continues from the newest checkpoint.

Consumes: the end of an attempt; signals, which the attempt gets. Waits for: these, and the pause before the next
attempt. Unblocked by: the kernel, which reports the end of a child even if it was killed.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

from verl import lifeline
from verl.checkpoint.find import TRACKER
from verl.errors import ConfigError, DataError, MissingDependencyError, ModelError, ReplayError
from verl.json_text import JsonObject, read_json
from verl.observability.backends.notebook import in_notebook
from verl.terminal import tell
from verl.trainer import signals
from verl.trainer.signals import SIGNALS

KEY = "trainer.max_restarts"
PERMANENT = (ConfigError, DataError, ModelError, MissingDependencyError, ReplayError)
"""Errors that a restart cannot remove."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the next attempt; they double as long as attempts end without a new checkpoint."""
PRELOADED = ("torch._dynamo", "torch.distributed.tensor", "transformers.models.auto.configuration_auto")
"""Imports that take most of a start. They start no Python thread and open no device: a fork could use neither."""
REPORT_CHARACTERS = 2000
SIGNAL_SECONDS = 0.5
"""In which an attempt reports a signal that it got from others."""
LEFTOVER_SECONDS = 15.0
"""That programs of an ended attempt may take to end: their guards kill them after `lifeline.GRACE_SECONDS`."""


class EndReport:
    """In an attempt: reports to the process that waits why the run ended. One that was killed reports nothing.

    Args:
        writer: file descriptor of a pipe.
        attempt: its number, from 1; what the block gets.
    """

    def __init__(self, writer: int, attempt: int):
        self._writer, self._attempt = writer, attempt

    def __enter__(self) -> int:
        signals.on_first(lambda number: self._write({"signal": number}))
        return self._attempt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason = "" if error is None else f"{type(error).__name__}: {error}"[:REPORT_CHARACTERS]
        self._write({"is_complete": error is None, "is_permanent": isinstance(error, PERMANENT), "reason": reason})

    def _write(self, report: dict[str, object]) -> None:
        with suppress(BrokenPipeError):  # the process that waits was killed
            os.write(self._writer, json.dumps(report).encode() + b"\n")


class AttemptProcess:
    """In the process that waits: a forked attempt.

    Args:
        pid: of the attempt.
        reader: file descriptor of the pipe of its `EndReport`.
        earlier: children of this process that are not the run's.
    """

    def __init__(self, pid: int, reader: int, earlier: Collection[int]):
        self.pid, self._reader, self._earlier = pid, reader, earlier
        os.set_blocking(reader, False)  # a process that the attempt leaves behind has the other end open
        self._text = b""

    def wait(self, stops: Collection[int]) -> tuple[int, int | None]:
        """Pass signals on until the attempt has ended.

        Returns:
            Its status, negative if a signal killed it, and the first signal that this process got.
        """
        stop = None
        while True:
            number = signal.sigwait({*stops, signal.SIGCHLD})
            if number != signal.SIGCHLD:
                if stop is not None or not self._has_signal():
                    os.kill(self.pid, number)
                stop = stop or number
            elif (status := self._reap()) is not None:
                return status, stop

    def report(self) -> JsonObject:
        """What the attempt has reported; nothing if it was killed. Closes the pipe."""
        self._read()
        os.close(self._reader)
        return {key: value for line in self._text.splitlines() for key, value in read_json(line).items()}

    def end_leftovers(self) -> None:
        """End what the attempt has left behind, and return once it is gone: it has ports, and a GPU's memory."""
        lifeline.end_leftovers(self._earlier, tell)
        end = time.monotonic() + LEFTOVER_SECONDS
        while left := set(lifeline.children()) - {*self._earlier}:
            self._reap()
            if time.monotonic() > end:
                tell(f"{KEY}: these processes of the attempt do not end: {sorted(left)}")
                return
            time.sleep(0.02)

    def _has_signal(self) -> bool:
        """Whether the attempt gets a signal from others too: a scheduler sends it to every process of a job."""
        select.select([self._reader], [], [], SIGNAL_SECONDS)
        self._read()
        return bool(self._text)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self._text += os.read(self._reader, 1 << 16)

    def _reap(self) -> int | None:
        """The attempt's status if it has ended; orphans that ended go too, since others may wait for their end."""
        result = None
        for process in {self.pid, *lifeline.children()} - {*self._earlier}:
            with suppress(ChildProcessError):  # the attempt was reaped before
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended == self.pid:
                    result = os.waitstatus_to_exitcode(status)
        return result


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
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if in_notebook() or not children.exists():
        where = "a notebook" if in_notebook() else f"{sys.platform} without {children}"
        raise ConfigError("a run restarts as a program on Linux", key=KEY, got=where, fix=f"Set {KEY}=0.")
    for name in PRELOADED:
        importlib.import_module(name)
    lifeline.adopt_orphans()  # what a killed attempt leaves behind ends before the next one begins
    earlier = frozenset(lifeline.children())
    stops = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}  # nohup ignores SIGHUP
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would hide the end of an attempt
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    attempts: list[RunAttempt] = []
    status = None
    while status is None:
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        parent, first, start = os.getpid(), _step(folder), time.monotonic()
        memory = memory_events()
        pid = os.fork()
        if not pid:
            os.close(reader)
            _join(parent, mask)
            return EndReport(writer, len(attempts) + 1)
        os.close(writer)
        process = AttemptProcess(pid, reader, earlier)
        result, stop = process.wait(stops)
        process.end_leftovers()
        steps, seconds = (first, _step(folder)), time.monotonic() - start
        attempts.append(attempt_of(result, process.report(), stop, *steps, seconds, memory_events() - memory))
        status = attempts[-1].status if is_last(attempts, max_restarts) else _pause(attempts, stops)
    if len(attempts) > 1 or not attempts[-1].is_final:
        lines = "".join(f"\n  attempt {number}, {attempt}" for number, attempt in enumerate(attempts, 1))
        tell(f"{KEY}={max_restarts}: {len(attempts)} attempts{lines}")
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    raise SystemExit(status)


def _pause(attempts: Sequence[RunAttempt], stops: Collection[int]) -> int | None:
    """Wait before the next attempt; the exit status if a signal ends the run meanwhile."""
    seconds = pause_before(attempts)
    tell(f"{KEY}: attempt {len(attempts)} ended, {attempts[-1]}; the next one begins in {seconds:.0f} s")
    stop = signal.sigtimedwait(stops, seconds)
    return None if stop is None else 128 + stop.si_signo


def attempt_of(
    result: int,
    report: JsonObject,
    stop: int | None,
    first: int,
    last: int,
    seconds: float,
    memory: Mapping[str, int] = MappingProxyType({}),
) -> RunAttempt:
    """An attempt from how its process ended and what it reported.

    Args:
        result: exit status, negative if a signal killed it.
        report: of `EndReport`; empty if it was killed.
        stop: the signal that was to end the run.
        memory: `memory_events` meanwhile; ``oom_kill`` counts kills for any limit, ``oom`` rises with the group's own.
    """
    exits = {code for number in SIGNALS for code in (-number, 128 + number)}
    is_complete, reason = bool(report.get("is_complete")), str(report.get("reason") or "")
    if is_complete:
        text = "complete"
    elif result < 0:
        text = f"killed by {signal.Signals(-result).name}"
    else:
        text = reason or f"ended with status {result} before it could report why (its output says more, and hang.txt)"
    if memory.get("oom_kill") and not is_complete:
        place = "the control group" if memory.get("oom") else "the machine or a group around this one"
        text += f" (meanwhile the kernel killed {memory['oom_kill']} processes: {place} was out of memory)"
    is_stopped = stop is not None or "signal" in report or result in exits
    is_final = is_complete or bool(report.get("is_permanent")) or is_stopped
    status = result if result >= 0 else 128 - result
    if not is_complete and not status:
        status = 1  # os._exit(0) in a user's code does not complete a run
    return RunAttempt(status, text, is_final, bool(reason), first, last, seconds)


def memory_events(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> Counter[str]:
    """Counts in ``memory.events`` of this process's control group (version 2, below ``root``); none without one."""
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::/"):
                text = (root / line.removeprefix("0::/") / "memory.events").read_text(encoding="utf-8")
                return Counter({name: int(count) for name, count in map(str.split, text.splitlines())})
    return Counter()


def is_last(attempts: Sequence[RunAttempt], max_restarts: int) -> bool:
    """Whether no attempt follows: all are used, or the last one ended for good.

    An error that comes twice in a row at one checkpoint will come again.
    """
    last, previous = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    is_repeated = (
        last.is_error and previous is not None and (last.reason, last.last) == (previous.reason, previous.last)
    )
    return last.is_final or len(attempts) > max_restarts or (last.is_error and is_repeated)


def pause_before(attempts: Sequence[RunAttempt]) -> float:
    """Seconds before the next attempt: twice as long for each one in a row that made no checkpoint."""
    count = 0
    for attempt in reversed(attempts):
        if attempt.last > attempt.first:
            break
        count += 1
    return min(FIRST_PAUSE * 2 ** max(count - 1, 0), LONGEST_PAUSE)


def _join(parent: int, mask: Iterable[int]) -> None:
    """In an attempt: signals come through the process that waits, at whose death this one saves and ends."""
    os.setpgid(0, 0)  # a terminal would send Ctrl-C to both, and the second signal ends a run at once
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a process in the background that reads from its terminal is stopped without a word
    os.close(null)
    threading.Thread(target=_end_with, args=(parent,), name="verl-waiting-process", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_with(parent: int) -> None:
    lifeline.wait_for_end(parent)  # PR_SET_PDEATHSIG comes again for each thread that the other process has
    os.kill(os.getpid(), signal.SIGTERM)


def _step(folder: Path) -> int:
    """Of the newest checkpoint; 0 without one."""
    try:
        return int((folder / TRACKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        tell(f"{KEY}: the step of the newest checkpoint is unknown: {folder / TRACKER}: {error}")
        return 0
