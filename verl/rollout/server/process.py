"""A server started here: ready before the first request, stopped with this process, its last output in the error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl import env, lifeline
from verl.outcomes import on_error
from verl.rollout.lost import EngineLostError
from verl.rollout.server.client import HttpClient
from verl.serving import secret
from verl.serving.listener import private_folder

POLL_SECONDS = 0.2
END_WITH_STDIN, ANNOUNCE, TRANSPORT = "--end-with-stdin", "--announce", "--transport"
"""Arguments of a host of ours. The first makes it end when its standard input does: the system closes that however this
process ends."""
KEY = "VERL_SERVER_KEY"
"""Variable that holds the key of a host, which its environment does not show to other users."""
_START = "actor_rollout_ref.rollout.server.max_start_wait_time"


class ServerProcess(lifeline.ChildProgram):
    """A server in a child process.

    Args:
        command: starts it.
        url: where it will listen.
        environment: added to this process's own.
        name: for messages.
        pipes: descriptors that it keeps.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        environment: Mapping[str, str] | None = None,
        name: str = "",
        pipes: Sequence[int] = (),
    ):
        self.url = url
        super().__init__(command, {**env.whole(), **(environment or {})}, name or command[0], pipes)

    @classmethod
    def foreign(
        cls, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None, name: str = ""
    ) -> ServerProcess:
        """A server that is not of this library, on a port of loopback; it ends with everything that it started."""
        return cls(lifeline.guarded(command), f"http://127.0.0.1:{port}", environment, name or command[0])

    async def wait_until_up(self, seconds: float) -> None:
        """Return once it answers.

        Raises:
            EngineLostError: it ended, or did not come up in time, with the last lines of its output; or a process of
                another user answers in its place.
        """
        client = HttpClient(self.url)
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(EngineLostError):
                if (await client.ask("GET", "/health", timeout=5.0)).status < 500:
                    return self._check_owner()
            self._check(deadline, seconds)
            await asyncio.sleep(POLL_SECONDS)

    def _check(self, deadline: float, seconds: float) -> None:
        if not self.is_alive:
            raise EngineLostError(self.exit_report)
        if time.monotonic() > deadline:
            raise EngineLostError(f"{self.name} did not come up within {seconds:g} s: {self.output_tail}", key=_START)

    def _check_owner(self) -> None:
        port = int(self.url.rpartition(":")[2])
        strangers = owners_of(port) - {os.geteuid()}
        if strangers:
            raise EngineLostError(f"user {min(strangers)} listens on port {port}, which was chosen for {self.name}")

    @property
    def exit_report(self) -> str:
        """Of a process that has ended: its exit status and last output."""
        status = self.process.wait()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self.name} ended with {how}; it said last: {self.output_tail}"


class HostProcess(ServerProcess):
    """A host of this library: on a unix socket in a private folder of this user, with its own key.

    Args:
        arguments: of its command line.
        file: of its configuration, by name and text; it is there until the host is up.
        key: that several hosts share; None makes one.
        environment: added to this process's own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        device: str,
        name: str,
        file: tuple[str, str] | None = None,
        key: str | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.folder, self.key = private_folder("verl-host-"), key or secret.new_key()
        self._file = None if file is None else self.folder / file[0]
        path = self.folder / "socket"
        command = [sys.executable, "-m", "verl.rollout.server.host", "--socket", str(path), "--device", device]
        self._pipe, theirs = os.pipe()
        try:
            with on_error(lambda _: self._abandon()):
                if file is not None and self._file is not None:
                    self._file.write_text(file[1])
                    arguments = [*arguments, f"--config-path={self.folder}", f"--config-name={self._file.stem}"]
                command += [END_WITH_STDIN, ANNOUNCE, str(theirs), *arguments]
                super().__init__(command, f"unix:{path}", {**(environment or {}), KEY: self.key}, name, (theirs,))
        finally:
            os.close(theirs)

    def _abandon(self) -> None:
        self._close_pipe()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def wait_until_up(self, seconds: float) -> None:
        try:
            await asyncio.to_thread(self._hear, seconds)
        finally:
            self._close_pipe()
            if self._file is not None:
                self._file.unlink(missing_ok=True)

    def _hear(self, seconds: float) -> None:
        """Wait for the line that says where it listens, or for its end."""
        deadline, said = time.monotonic() + seconds, b""
        while not said.endswith(b"\n"):
            if select.select([self._pipe], [], [], POLL_SECONDS)[0]:
                piece = os.read(self._pipe, 4096)
                if not piece:
                    raise EngineLostError(self.exit_report)
                said += piece
            else:
                self._check(deadline, seconds)

    def close(self) -> None:
        super().close()
        self._close_pipe()  # of one that was not waited for
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close_pipe(self) -> None:
        """Once: its number may be another file's by now."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)


def owners_of(port: int) -> set[int]:
    """The users whose processes listen on a port of this machine."""
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == LISTENS:
                    owners.add(int(fields[7]))
    return owners


LISTENS = "0A"
"""A socket's state in the system's tables."""
