"""Runs a program that must not outlive whoever started it: ``python verl/lifeline.py command...``.

For programs that do not end by themselves when their caller is killed. The caller holds the other end of the standard
input; when that is closed, however the caller ended, the program and everything that it started are ended. Only the
standard library is used, so that this process starts in a moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

GRACE_SECONDS = 5.0
DEATH_SIGNAL, SUBREAPER = 1, 36
"""Numbers of ``prctl``: the signal at the parent's death, and that orphans below become children."""


def guarded(command: Sequence[str]) -> list[str]:
    """The command that runs a command under this one; its standard input has to be a pipe of the caller's."""
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), *command]


def die_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def main(command: list[str]) -> int:
    """Run a command; its status."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509 -- no other thread yet
    signal.signal(signal.SIGTERM, lambda *_: program.terminate())
    threading.Thread(target=_end_with_stdin, args=(program,), daemon=True).start()
    status = program.wait()
    _end_children()
    return status if status >= 0 else 128 - status


def _end_with_stdin(program: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    program.terminate()
    with suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_SECONDS)
    program.kill()


def _end_children() -> None:
    """Kill what the program left behind; orphans come here one generation after the other."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        children = _children()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            found += [int(number) for number in listed.read().split()]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
