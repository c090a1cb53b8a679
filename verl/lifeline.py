"""Runs a program that must not outlive its parent: ``python verl/lifeline.py PID command...``.

For programs that do not end by themselves when the process PID is killed. However that process ends, the program and
everything that it started are ended. Standard input and output are the program's. `ChildProgram` starts a program and
reads its output. Only the standard library is used, so that this process starts in a moment.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

GRACE_SECONDS = 3.0
KILL_SECONDS = 10.0
"""That a `ChildProgram` gets to end before it is killed."""
LAST_LINES = 12
DEATH_SIGNAL, SUBREAPER = 1, 36
"""Numbers of ``prctl``: the signal at the parent's death, and that orphans below become children."""


def guarded(command: Sequence[str]) -> list[str]:
    """The command that runs a command, and ends it with this process; the command itself where there is no Linux."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), str(os.getpid()), *command]


class ChildProgram:
    """A running program, whose output a thread reads; it ends with `close`, or when this process exits.

    Args:
        command: starts it; `guarded` if it would outlive a kill of this process.
        environment: all of its variables.
        name: of the thread, and in messages.
        pipes: descriptors that it inherits.

    Raises:
        OSError: it cannot be started. RuntimeError: there is no further thread.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str, pipes: Sequence[int] = ()):
        self.name = name
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=pipes,
            start_new_session=True,  # what a terminal sends is the run's to answer, which still needs it
        )
        atexit.register(self.close)
        self._reader = threading.Thread(target=self._listen, name=f"output of {name}", daemon=True)
        try:
            self._reader.start()
        except RuntimeError:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def output_tail(self) -> str:
        return "\n".join(self._last) or "it said nothing"

    def on_line(self, line: str) -> None:
        """Take a line of its output, in the thread that reads it."""
        self._last.append(line)

    def on_end(self, status: int) -> None:
        """Called in that thread after the last line."""

    def close(self) -> None:
        """End it, and the thread that reads its output; each gets some seconds for it."""
        if self.is_alive:
            self.process.terminate()
            try:
                self.process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(KILL_SECONDS)
        # A process that the program left behind may hold the output open: its reader then closes it.
        for pipe in (self.process.stdin, None if self._reader.is_alive() else self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        atexit.unregister(self.close)

    def _listen(self) -> None:
        assert self.process.stdout is not None, "a pipe"
        with self.process.stdout as output:
            for line in output:
                self.on_line(line.rstrip())
        self.on_end(self.process.wait())


def main(caller: int, command: list[str]) -> int:
    """Run a command; its status."""
    adopt_orphans()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal sends it to all; the program inherits this
    try:
        program = subprocess.Popen(command, preexec_fn=die_with_parent)  # noqa: PLW1509 -- no other thread yet
    except OSError as error:
        print(f"{command[0]} cannot be started: {error}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGTERM, lambda *_: _end_soon(program))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the program, too
    threading.Thread(target=_end_with, args=(caller, program), daemon=True).start()
    status = _wait(program)
    end_children()
    return status if status >= 0 else 128 - status


def _wait(program: subprocess.Popen[bytes]) -> int:
    """The program's status. Orphans that end before it are collected: another process may wait for their end."""
    # No other code may reap the program, or this would wait for the next process that ends.
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != program.pid:
        os.waitpid(ended.si_pid, os.WNOHANG)
    return program.wait()


def adopt_orphans() -> None:
    """Processes below this one become its children when their parent ends (Linux)."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """This process is killed when the thread ends that has forked it (Linux)."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _end_soon(program: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and make it after a while; by its number, which `_wait` holds until it has ended."""
    _signal(program, signal.SIGTERM)
    killing = threading.Timer(GRACE_SECONDS, _signal, (program, signal.SIGKILL))
    killing.daemon = True
    killing.start()


def _signal(program: subprocess.Popen[bytes], number: int) -> None:
    if program.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(program.pid, number)


def _end_with(caller: int, program: subprocess.Popen[bytes]) -> None:
    wait_for_end(caller)
    _end_soon(program)


def wait_for_end(parent: int) -> None:
    """Block until this process's parent has ended; returns at once if ``parent`` is not its parent any more."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    except PermissionError:  # in containers whose filter is older than the call
        while os.getppid() == parent:
            time.sleep(0.2)
        return
    if os.getppid() == parent:  # else it ended before, and its number may be another's
        select.select([watched], [], [])
    os.close(watched)


def end_children() -> None:
    """Kill what is left below this process; orphans come here one generation after the other."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        for child in children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def ending(code: int) -> str:
    """How a process ended: its exit code, or less than 0 for a signal."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {-code}, {signal.Signals(-code).name}"
    return f"signal {-code}"


@functools.cache
def end_leftovers_at_exit(say: Callable[[str], object]) -> None:
    """When this process ends, end what its code starts from now on and leaves behind, and say what that was."""
    atexit.register(end_leftovers, frozenset(children()), say)


def end_leftovers(earlier: Collection[int], say: Callable[[str], object]) -> None:
    """End the children that are not among ``earlier``, with what they started, and say what that was."""
    import multiprocessing  # here, since a guard needs none

    daemons = {process.pid for process in multiprocessing.active_children() if process.daemon}  # Python ends them
    others = (child for child in children() if child not in earlier and child not in daemons)
    left = {number: name for child in others for number, name in _below(child).items()}
    if left:
        names = ", ".join(f"{number} ({name[:60]})" for number, name in left.items())
        say(f"processes that the run's code has started are ended with it: {names}")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(map(_runs, left)) and time.monotonic() < deadline:
            time.sleep(0.01)


def _below(process: int) -> dict[int, str]:
    """A process and those below it, by number, with their commands; nothing for one that ends by itself.

    That is what `guarded` has started, and the tracker of multiprocessing.
    """
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return {}
    if not command or os.path.abspath(__file__) in command or "multiprocessing.resource_tracker" in command:
        return {}
    listed = {process: command}
    for child in children(process):
        listed |= _below(child)
    return listed


def _runs(process: int) -> bool:
    with suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] != b"Z"
    return False


def children(process: int | str = "self") -> list[int]:
    """Numbers of a process's children, zombies included."""
    listed: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with suppress(OSError), open(f"/proc/{process}/task/{task}/children") as file:
                listed += [int(number) for number in file.read().split()]
    return listed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
