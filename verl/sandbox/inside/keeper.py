"""The watcher and the keeper of a pool: the first puts up the outer walls and guards the second, which forks the runs.

Spoken to over one socket: the caller sends a byte with the socket of a new run attached, and the keeper forks the run's
first process onto it. The keeper holds a copy of that socket until the run's last process is gone, so the caller reads
the end of the stream only then; and when the caller closes its end, the keeper kills the run.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from verl.sandbox.inside import init, root, walls
from verl.sandbox.kernel import calls

CONTROL_FD = 3
MAX_START = 1 << 20


class _Refused(Exception):
    """Reports what is missing to the caller; nothing runs."""


def main() -> NoReturn:
    """Read the start message, build the walls, fork the keeper, and live as long as both the caller and the keeper."""
    control = socket.socket(fileno=CONTROL_FD)
    control.set_inheritable(False)
    start = json.loads(control.recv(MAX_START))
    caller = os.pidfd_open(os.getppid())
    if os.getppid() != start["caller"]:
        os._exit(1)  # it died while we started
    try:
        stand = walls.raise_outer(
            start["paths"],
            start["without"],
            lambda missing: _accept(missing, start["accepted"]),
            start["newest_landlock"],
            start["folders"],
        )
    except _Refused as error:
        control.send(json.dumps({"missing": error.args[0]}).encode())
        os._exit(0)
    keeper = os.fork()
    if keeper == 0:
        calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(caller)
        Keeper(control, stand, start).serve()
    control.close()
    poll = select.poll()
    watched = (caller, os.pidfd_open(keeper))
    for fd in watched:
        poll.register(fd, select.POLLIN)
    poll.poll()
    with suppress(ProcessLookupError):
        os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    os._exit(0)


class Keeper:
    """Forks the first process of each run and buries it."""

    def __init__(self, control: socket.socket, stand: walls.Walls, start: Mapping[str, Any]):
        self._control, self._walls, self._start = control, stand, start
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._runs: dict[int, tuple[socket.socket, int]] = {}
        """By pidfd of a run's first process: its socket and its pid. A socket's number leads to the same entry."""
        self._by_socket: dict[int, int] = {}
        self._own_pids: int | None = None

    def serve(self) -> NoReturn:
        """Until the caller closes the socket."""
        try:
            self._prepare()
            while self._step():
                continue
        finally:
            os._exit(0)

    def _prepare(self) -> None:
        if self._walls.has("namespaces"):
            self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        folders = self._start["sys_path"]
        sys.path[:] = [root.place(path) for path in folders] if self._walls.has("namespaces") else folders
        failed = {}
        for name in self._start["preload"]:
            try:
                importlib.import_module(name)
            except Exception as error:  # the boundary to a package of the user's, which may raise anything
                failed[name] = f"{type(error).__name__}: {error}"
        _let_no_signal_through()
        gc.freeze()
        self._control.send(json.dumps({"missing": dict(self._walls.missing), "ready": True, "failed": failed}).encode())

    def _step(self) -> bool:
        """Wait for something to happen. False when the caller is gone."""
        happened = [fd for fd, _ in self._poll.poll()]
        for fd in happened:
            if fd in self._runs:
                self._end(fd)
            elif fd in self._by_socket:  # the caller closed its end
                os.kill(self._runs[self._by_socket[fd]][1], signal.SIGKILL)
                self._poll.unregister(fd)
        # Last, because a new run may be given the descriptors of one that ended in this very step.
        return self._begin() if self._control.fileno() in happened else True

    def _begin(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 16, 1)
        if not message:
            return False
        channel = socket.socket(fileno=fds[0])
        try:
            pid = self._fork(channel)
        except OSError as error:  # out of processes or memory: the caller reads the reason, then the end
            with suppress(OSError):
                channel.sendall(init.pack_broken(init.reason_of(error)))
            channel.close()
            return True
        exited = os.pidfd_open(pid)
        self._runs[exited] = (channel, pid)
        self._by_socket[channel.fileno()] = exited
        self._poll.register(exited, select.POLLIN)
        self._poll.register(channel.fileno(), select.POLLRDHUP)
        return True

    def _fork(self, channel: socket.socket) -> int:
        """The first process of a pid namespace of its own."""
        if self._own_pids is None:
            pid = os.fork()
            return pid or init.main(channel, self._walls)
        calls.unshare(calls.CLONE_NEWPID)
        try:
            pid = os.fork()
            return pid or init.main(channel, self._walls)
        finally:  # a namespace can be left for another one only from here
            calls.setns(self._own_pids, calls.CLONE_NEWPID)

    def _end(self, exited: int) -> None:
        """Bury a run. Its first process is reaped only after all others of its namespace."""
        channel, pid = self._runs.pop(exited)
        os.waitpid(pid, 0)
        self._poll.unregister(exited)
        os.close(exited)
        if self._by_socket.pop(channel.fileno(), None) is not None:
            with suppress(KeyError):
                self._poll.unregister(channel.fileno())
        channel.close()


def _let_no_signal_through() -> None:
    """Take off every handler, those of preloaded packages too.

    The kernel keeps a program's signals from the first process of its pid namespace only where that has no handler.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            with suppress(OSError):  # two of them belong to the C library
                signal.signal(number, signal.SIG_DFL)


def _accept(missing: Mapping[str, str], accepted: Any) -> None:
    """Refuse here what the caller would refuse, before anything else is started."""
    if any(name not in accepted for name in missing):
        raise _Refused(dict(missing))


if __name__ == "__main__":
    main()
