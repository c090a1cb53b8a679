"""The first process of a run: starts the program's process for each case, watches it, and tells the caller the outcome.

It holds the only way out, a socket that the program's process does not have. It runs no line of the program, cannot be
signalled by it (the kernel keeps the first process of a pid namespace from that), and kills everything in the namespace
after each case. When it ends itself, the kernel kills what is left.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from verl.sandbox import frames
from verl.sandbox.inside import program, root, walls
from verl.sandbox.inside.watch import ProgramWatch
from verl.sandbox.kernel import calls

REQUEST_PIECE = 1 << 16
LOW_FDS = 64
HIGHEST_FD = 1 << 16
READY = b"ready"


def main(channel: socket.socket, stand: walls.Walls) -> NoReturn:
    """Serve one request, then end."""
    code = 1
    try:
        calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)  # with the keeper, also without a pid namespace
        os.closerange(3, channel.fileno())
        os.closerange(channel.fileno() + 1, HIGHEST_FD)
        _Run(channel, stand).serve()
        code = 0
    except Exception as error:  # the boundary to the caller, if it lives: never an outcome of a program
        _tell(channel, pack_broken(reason_of(error)))
    finally:
        os._exit(code)


class _Run:
    """One request of the caller: cases of a program, or a session of cells."""

    def __init__(self, channel: socket.socket, stand: walls.Walls):
        self._channel, self._walls = channel, stand
        self._collector = frames.Frames()
        self._waiting: list[Any] = []

    def serve(self) -> None:
        request = self._next()
        if request is None:
            return
        os.setsid()
        self._limits = {**request["limits"], "base": walls.address_space(), "session": request["kind"] == "session"}
        self._folder = request["folder"] or root.TEMPORARY
        self._proc = walls.enter_run(self._walls)
        if request["kind"] == "session":
            self._serve_cells()
            return
        for number, case in enumerate(request["cases"]):
            if request["folder"]:  # of this machine: each case gets an empty one below it
                self._folder = os.path.join(request["folder"], str(number))
                os.mkdir(self._folder)
            watch = self._start(partial(program.prepare_case, request["code"], case), case.get("stdin", ""))
            _tell(self._channel, frames.pack(watch.until_the_end()))

    def _serve_cells(self) -> None:
        """One process for all cells; a cell that is stopped, or that ends it, ends the session."""
        watch = self._start(program.prepare_cells, None)
        while (cell := self._next()) is not None:
            answer = watch.run_cell(cell)
            _tell(self._channel, frames.pack(answer))
            if answer["ended"]:
                return
        watch.kill()

    def _start(self, prepare: Callable[[], Callable[[], NoReturn]], stdin: str | None) -> ProgramWatch:
        """Fork the program's process. ``stdin`` None: standard input is empty, and cells can be sent.

        Raises OSError unless it says that it stands behind all its walls. It says so, or what stopped it, through a
        pipe that is closed before the program begins, so that no program can say it.
        """
        inputs, outputs, errors, report, cells, trouble = (os.pipe() for _ in range(6))
        pipe_ends = [inputs[0], outputs[1], errors[1], report[1], *([cells[0]] if stdin is None else [])]
        init = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_program(pipe_ends, trouble[1], init, prepare)
            finally:
                os._exit(1)
        for fd in (*pipe_ends, trouble[1]):
            os.close(fd)
        with os.fdopen(trouble[0], "rb") as pipe:
            heard = pipe.read()
        if heard != READY:
            raise OSError(heard.decode("utf-8", "replace") or f"its process ended before its walls stood ({_end(pid)})")
        ends = {"stdin": inputs[1], "stdout": outputs[0], "stderr": errors[0], "report": report[0], "cells": cells[1]}
        if stdin is not None:
            os.close(cells[0])
            os.close(ends.pop("cells"))
        data = (stdin or "").encode("utf-8", "surrogatepass")
        return ProgramWatch(pid, ends, data, self._limits, self._proc, everything=self._walls.has("namespaces"))

    def _become_program(
        self, pipe_ends: list[int], trouble: int, init: int, prepare: Callable[[], Callable[[], NoReturn]]
    ) -> None:
        """Keep the pipes as descriptors 0 to 4, close all others, put up the last walls, run."""
        open_fds = [*pipe_ends, trouble, *([] if self._proc is None else [self._proc])]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOW_FDS) for fd in open_fds]
        os.closerange(0, LOW_FDS)
        for fd in range(LOW_FDS, max(high)):
            if fd not in high:
                os.close(fd)
        os.closerange(max(high) + 1, HIGHEST_FD)
        for place in range(len(pipe_ends)):
            os.dup2(high[place], place, inheritable=place < program.REPORT_FD)
            os.close(high[place])
        trouble = high[len(pipe_ends)]
        try:
            proc = high[-1] if self._proc is not None else None
            walls.enter_program(self._walls, self._limits, proc, self._folder, init)
            body = prepare()
            os.write(trouble, READY)
        except BaseException as error:  # the boundary behind which the program begins: not its doing, whatever it is
            os.write(trouble, reason_of(error).encode("utf-8", "replace"))
            return
        os.close(trouble)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        body()

    def _next(self) -> Any:
        """The caller's next message; None when it is gone."""
        while not self._waiting:
            piece = self._channel.recv(REQUEST_PIECE)
            if not piece:
                return None
            self._waiting = self._collector.feed(piece)
        return self._waiting.pop(0)


def reason_of(error: BaseException) -> str:
    """An error in words: the kernel's own, else with the name of its class."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _end(pid: int) -> str:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def pack_broken(reason: str) -> bytes:
    """The message that says that no program could be run, and why."""
    return frames.pack({"broken": reason})


def _tell(channel: socket.socket, message: bytes) -> None:
    try:
        channel.sendall(message)
    except OSError:  # the caller is gone; nobody is left to tell
        return
