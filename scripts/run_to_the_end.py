"""Run a command, and end with it everything that it started.

    python scripts/run_to_the_end.py [--grace SECONDS] COMMAND [ARGUMENT ...] <lifeline

The lifeline is a pipe that the caller holds open. When it closes, because the caller was killed or closed it, or when
the command has ended, every process that descends from the command is killed, those in sessions of their own and those
whose parents are gone included; after the command's own end they have the grace to end by themselves (10 s). Exits
with the command's status. What was left behind is named on standard error.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
GRACE = 10.0  # seconds
LOOK = 0.1  # seconds between two looks at what has ended


def main(command: list[str], grace: float = GRACE) -> int:
    """The command's exit status; 128 + the signal's number if a signal ended it, 143 if the lifeline closed."""
    adopt_orphans()
    # The terminal sends its interrupt to the command as well, which decides what to do about it.
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    if wait_for_end(process):
        let_end(grace)
    survivors = end_all()
    if process.returncode is None:
        return 128 + signal.SIGTERM
    if survivors:
        print(f"left behind, killed: {'; '.join(survivors)}", file=sys.stderr, flush=True)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (Linux; elsewhere they are not seen)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_end(process: subprocess.Popen) -> bool:
    """True once the command has ended, False once the lifeline has closed."""
    while process.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], LOOK)
        if ready and not os.read(sys.stdin.fileno(), 1 << 10):
            return False
        reap(process.pid)
    return True


def let_end(seconds: float) -> None:
    """Wait for descendants to end by themselves, no longer than this."""
    deadline = time.monotonic() + seconds
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)


def descendants() -> list[psutil.Process]:
    """Every living process below this one."""
    reap()
    return [one for one in psutil.Process().children(recursive=True) if is_alive(one)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all() -> list[str]:
    """Kill until nothing is left, since what is killed may just have started something; the command lines."""
    names: dict[int, str] = {}
    while living := descendants():
        for one in living:
            try:
                names.setdefault(one.pid, f"{one.pid} {' '.join(one.cmdline())[:200] or one.name()}")
                one.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return list(names.values())


def reap(but: int | None = None) -> None:
    """Collect the statuses of children that have ended, adopted ones included; they stay zombies otherwise.

    Somebody who waits for a process to be gone waits for its zombie, too. The status of ``but`` is left to its caller.
    """
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == but:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
    except ChildProcessError:
        return


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(main(words[2:], float(words[1])) if words[:1] == ["--grace"] else main(words))
