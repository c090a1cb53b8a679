"""Watches the program's process: feeds it, collects what it prints, and ends it at the first limit it reaches."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from verl.sandbox import frames
from verl.sandbox.inside.tasks import Tasks

TICK = 0.02
PIECE = 1 << 16
REPORT_SLACK = 4096
HEAD_START = 0.1


class ProgramWatch:
    """One process of the program, with everything that it starts.

    Args:
        ends: our ends of its pipes: stdin, stdout, stderr, report, and cells for a session.
        data: its standard input.
        proc: the /proc of its pid namespace, where its processes are watched; None: it has only one.
        everything: whether this process is the first of a pid namespace, and so may kill all in it.
    """

    def __init__(
        self,
        pid: int,
        ends: Mapping[str, int],
        data: bytes,
        limits: Mapping[str, Any],
        proc: int | None,
        everything: bool,
    ):
        self._pid, self._ends, self._limits, self._everything = pid, dict(ends), limits, everything
        self._tasks = None if proc is None else Tasks(proc, limits)
        self._data = memoryview(data)
        self._cap = limits["output_kb"] * 1024
        self._texts = {name: bytearray() for name in ("stdout", "stderr", "report")}
        self._status: int | None = None
        self._reason = ""
        self._poll = select.poll()
        self._exit = os.pidfd_open(pid)
        self._poll.register(self._exit, select.POLLIN)
        for name, fd in self._ends.items():
            os.set_blocking(fd, False)
            if name != "cells":
                self._poll.register(fd, select.POLLOUT if name == "stdin" else select.POLLIN)
        self._begin()

    def until_the_end(self) -> dict[str, Any]:
        """Watch until the process ends or is ended; afterwards nothing of it is left."""
        deadline = self._started + self._limits["seconds"]
        while self._status is None and not self._reason:
            self._step(deadline)
        return self._ended()

    def run_cell(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Send a cell and watch until it is reported done, or the process is ended by a limit or by itself."""
        self._begin()
        self._signal(signal.SIGCONT)
        deadline = self._started + self._limits["seconds"]
        message = memoryview(frames.pack(cell))
        while self._status is None and not self._reason:
            with suppress(BlockingIOError, BrokenPipeError):
                message = message[os.write(self._ends["cells"], message) :] if message else message
            self._step(deadline)
            code = self._cell_code(cell["number"])
            if code is not None and not self._reason:
                self._drain()
                self._signal(signal.SIGSTOP)  # no work between cells
                return {**self._answer(), "exit_code": code, "ended": False}
        return {**self._ended(), "ended": True}

    def kill(self) -> None:
        """End the process and everything that it started, and wait until they are gone."""
        self._signal(signal.SIGKILL)
        while True:
            try:
                pid, status, _ = os.wait4(-1, 0)
            except ChildProcessError:
                return
            if pid == self._pid:
                self._status = status

    def _begin(self) -> None:
        self._started = time.monotonic()
        self._cpu_before, self._clock_before, self._paused = _cpu_of_children(), self._clock(), False
        for text in self._texts.values():
            text.clear()

    def _step(self, deadline: float) -> None:
        """Wait a little for something to happen, and handle it."""
        left = deadline - time.monotonic()
        if left <= 0:
            self._reason = "timeout"
            return
        for fd, _ in self._poll.poll(min(left, TICK) * 1000 + 1):
            if fd == self._exit:
                self._reap()
            elif fd == self._ends.get("stdin"):
                self._feed(fd)
            else:
                self._read(fd)
        self._reap()
        if self._status is None and not self._reason:
            if self._tasks is None:
                self._keep_to_one_core()
            else:
                self._reason = self._tasks.watch()

    def _feed(self, fd: int) -> None:
        try:
            if self._data:
                self._data = self._data[os.write(fd, self._data[:PIECE]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._data = self._data[:0]
        if not self._data:
            self._close("stdin")

    def _read(self, fd: int) -> bool:
        """One piece from a pipe; False at its end or when there is nothing now."""
        name = next((name for name, one in self._ends.items() if one == fd), None)
        if name is None:
            return False
        try:
            piece = os.read(fd, PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self._close(name)
            return False
        text = self._texts[name]
        text += piece
        cap = self._cap + (REPORT_SLACK if name == "report" else 0)
        if len(text) > cap:
            del text[cap:]
            self._reason = self._reason or "output"
            return False
        return True

    def _drain(self) -> None:
        """What is still in the pipes."""
        for name in ("stdout", "stderr", "report"):
            while name in self._ends and self._read(self._ends[name]):
                continue

    def _reap(self) -> None:
        """Take note of processes that ended; orphans of the program are ours to bury."""
        while True:
            try:
                pid, status, _ = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = status

    def _keep_to_one_core(self) -> None:
        """Stop and continue a process whose threads cannot be seen, so that it has the time of one core at most."""
        used = self._clock() - self._clock_before
        passed = time.monotonic() - self._started
        if self._paused and used <= passed:
            self._paused = False
            self._signal(signal.SIGCONT)
        elif not self._paused and used > passed + HEAD_START:
            self._paused = True
            self._signal(signal.SIGSTOP)

    def _clock(self) -> float:
        """Seconds of processor time of the process with all its threads; 0 where it is gone."""
        try:
            return time.clock_gettime(~self._pid << 3 | 2)  # clock_getcpuclockid(3), which Python has not
        except OSError:
            return 0.0

    def _cell_code(self, number: int) -> int | None:
        """The exit code of a cell that reported its end. The report may be forged: then the cell ends early."""
        for line in bytes(self._texts["report"]).splitlines():
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict) and message.get("cell") == number:
                code = message.get("exit")
                return code if isinstance(code, int) and not isinstance(code, bool) else 1
        return None

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(-1 if self._everything else self._pid, number)

    def _ended(self) -> dict[str, Any]:
        """Bury everything and say how the process ended."""
        seconds = time.monotonic() - self._started
        self.kill()
        self._drain()
        for name in list(self._ends):
            self._close(name)
        os.close(self._exit)
        status = self._status or 0
        answer = self._answer(seconds)
        answer["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        answer["exit_code"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        return answer

    def _answer(self, seconds: float | None = None) -> dict[str, Any]:
        return {
            **{name: bytes(text).decode("utf-8", "replace") for name, text in self._texts.items()},
            "reason": self._reason,
            "seconds": time.monotonic() - self._started if seconds is None else seconds,
            "cpu_seconds": _cpu_of_children() - self._cpu_before,
            "exit_code": None,
            "signal": None,
        }

    def _close(self, name: str) -> None:
        fd = self._ends.pop(name, None)
        if fd is None:
            return
        if name != "cells":
            self._poll.unregister(fd)
        os.close(fd)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
