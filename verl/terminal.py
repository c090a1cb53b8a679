"""Standard output and standard error that a run outlives: ``| head`` closes a pipe, a dropped connection a terminal.

Whatever writes there afterwards (a tracker, a progress bar, a ``print`` of a reward function) would fail, and end the
run or pass for an error of that code. So both lead to a file of the run from then on, and the run says so once.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

GONE = (errno.EPIPE, errno.EIO)  # of a pipe, and of a terminal
_file = os.devnull


class _Outlasting(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            _replace(self.fileno(), error)
            return super().write(data)


def outlive(file: str | Path) -> None:
    """Make this process, and those that it forks, outlive the end of their standard output and standard error.

    Streams that a notebook or a test has put there stay as they are.

    Args:
        file: what is printed afterwards is appended to it; where it cannot be written, nothing is kept.
    """
    global _file
    _file = os.fspath(file)
    for name, original in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        stream = getattr(sys, name)
        if stream is None or stream is not original or not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        raw = _Outlasting(stream.fileno(), "wb", closefd=False)
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        options = stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
        setattr(sys, name, io.TextIOWrapper(buffer, *options))


def tell(sentence: str) -> None:
    """One line on standard error without the locks of Python's own streams, for handlers; it cannot fail."""
    line = f"{sentence}\n".encode()
    try:
        os.write(2, line)
    except OSError as error:
        if error.errno in GONE:
            _replace(2, error)
            os.write(2, line)


def say_exits() -> None:
    """Make `os._exit` of this process say from where it was called: a run that it ends has no other last word."""
    if getattr(os._exit, "says_from_where", False):
        return
    exit_now, process = os._exit, os.getpid()

    def exit_and_say(status: int) -> NoReturn:
        caller = sys._getframe(1)
        is_usual = os.getpid() != process or caller.f_globals.get("__name__") == "multiprocessing.popen_fork"
        if not is_usual:  # the proper end of a fork
            place = f"{caller.f_code.co_filename}, line {caller.f_lineno}"
            tell(f"os._exit({status}) was called ({place}): the run ends here, and saves nothing")
        exit_now(status)

    exit_and_say.says_from_where = True  # type: ignore[attr-defined]
    os._exit = exit_and_say  # type: ignore[assignment]


def _replace(descriptor: int, error: OSError) -> None:
    """Lead a descriptor to the file, and say so: on standard error, which leads there, too, once it is gone."""
    path = _file
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        path, opened = os.devnull, os.open(os.devnull, os.O_WRONLY)
    os.dup2(opened, descriptor)
    os.close(opened)
    where = "is lost" if path == os.devnull else f"is in {path}"
    name = "error" if descriptor == 2 else "output"
    reason = os.strerror(error.errno or 0)
    tell(f"standard {name} is closed ({reason}): the run continues; what it prints from now on {where}")
