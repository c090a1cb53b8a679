"""An environment in a process of its own: it may exit, crash, fork or never return, and costs its episode alone.

`EnvironmentHost` is the process that has loaded the environment's code; `verl.agent_loop.envs.host` says what runs in
it. An episode is forked from it in some milliseconds, and ends with everything that it started when its socket is shut.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl import lifeline
from verl.agent_loop.envs.adapter import Environment, EnvironmentFailure, RemoteEnvironmentError
from verl.errors import ConfigError
from verl.metrics import notice
from verl.rewards import wire
from verl.sandbox import frames

BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
PROGRAM = Path(__file__).with_name("host.py")
START_SECONDS = 300.0
END_SECONDS = 1.0
"""In which a host that is gone is collected by its guard."""
RETRY_SECONDS = 1.0
PIECE = 1 << 16


class FullError(RemoteEnvironmentError):
    """The machine, or the limit of its container, has no further process; ``reason`` is the system's."""

    def __init__(self, reason: str):
        super().__init__(f"failed: {reason}")
        self.reason = reason


class EnvironmentHost:
    """The process from which the episodes of an environment are forked; it starts, and starts again, when needed.

    Args:
        path: ``file.py:name`` or ``my_pkg.mod:name``.
    """

    def __init__(self, path: str):
        self._path, self._threads = path, 0
        self._lock = threading.Lock()  # threads of several episodes send over the same socket
        self._freed = threading.Condition()  # threads whose episodes wait until another one has ended
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def start(self) -> int:
        """Start it if it does not run.

        Returns:
            The number of threads that loading the environment's code has started, which no episode has.

        Raises:
            ConfigError: the environment's code cannot be loaded.
        """
        with self._lock:
            if self._control is None:
                self._launch()
            return self._threads

    def episode(self) -> Link:
        """A process for one episode; where the machine has no further one, as soon as another episode has ended.

        Raises:
            RemoteEnvironmentError: there is none, and no other episode runs.
        """
        while True:
            try:
                return self._started()
            except FullError as error:
                self._wait_for_another(error)

    def release(self, link: Link) -> None:
        """End an episode; one that waits for its process may start."""
        link.close()
        with self._freed:
            self._links.discard(link)
            self._freed.notify()

    def _wait_for_another(self, error: FullError) -> None:
        with self._freed:
            if not self._links:
                raise error
            running = f"{len(self._links)} of its episodes run, others wait until one ends"
            notice(f"the environment {self._path}", f"no further process can be started ({error.reason}): {running}")
            self._freed.wait(RETRY_SECONDS)  # an episode that was given up is freed without a notification

    def _started(self) -> Link:
        process, link = self._request()
        try:
            return self._checked(link)
        except FullError:
            raise
        except RemoteEnvironmentError:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            if process.poll() is None:
                raise
        with self._lock:  # killed from outside perhaps, with all of its episodes
            if self._process is process:
                self._end()
        return self._checked(self._request()[1])

    def _checked(self, link: Link) -> Link:
        """The link, once its process runs; while it starts it counts as an episode for which others wait."""
        with self._freed:
            self._links.add(link)
        try:
            return link.check()
        except RemoteEnvironmentError:
            self.release(link)
            raise

    def close(self) -> None:
        """End it with all of its episodes."""
        with self._lock:
            self._end()

    def _request(self) -> tuple[subprocess.Popen[bytes], Link]:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._control is None:
                self._launch()
            assert self._control is not None and self._process is not None
            with suppress(OSError):  # it is gone, and so will the other end of this socket be
                socket.send_fds(self._control, [b"e"], [theirs.fileno()])
            return self._process, Link(ours)

    def _launch(self) -> None:
        control, theirs = socket.socketpair()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                lifeline.guarded([sys.executable, "-c", BOOT, path, str(PROGRAM), self._path]),
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        self._control = control
        control.settimeout(START_SECONDS)
        try:
            started = Link(control).receive()
        except RemoteEnvironmentError:
            started = {"failure": "the process ended"}
        except TimeoutError:
            started = {"failure": f"that took longer than {START_SECONDS:g} s"}
        control.settimeout(None)
        if started["failure"] is not None:
            self._end()
            raise ConfigError(f"{self._path} cannot be loaded in its process: {started['failure']}", key="environment")
        self._threads = started["threads"]

    def _end(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.terminate()
            process.wait()


class Link:
    """Our end of an episode's socket; one call at a time."""

    def __init__(self, connection: socket.socket):
        self._socket, self._frames, self._ready = connection, frames.Frames(), deque[Mapping[str, Any]]()

    def check(self) -> Link:
        """Itself, once its process runs."""
        answer = self.receive()
        if "full" in answer:
            raise FullError(answer["full"])
        return self

    def call(self, name: str, *arguments: object) -> object:
        """What the method of that name returns there.

        Raises:
            RemoteEnvironmentError: it raised, or the process ended.
        """
        try:
            packed = frames.pack({"call": name, "with": wire.to_plain(list(arguments))})
        except wire.NotPlainError as error:
            raise RemoteEnvironmentError(f"got {error}, which cannot be sent to its process") from error
        with suppress(ConnectionError):  # how it ended may still be read
            self._socket.sendall(packed)
        answer = self.receive()
        if "raised" in answer:
            raise RemoteEnvironmentError(answer["raised"])
        return wire.from_plain(answer["answer"])

    def receive(self) -> Mapping[str, Any]:
        """The next message.

        Raises:
            RemoteEnvironmentError: the process ended.
        """
        while not self._ready:
            try:
                piece = self._socket.recv(PIECE)
                self._ready.extend(self._frames.feed(piece))
            except (ConnectionError, ValueError):
                piece = b""
            if not piece:
                raise RemoteEnvironmentError("ended its process")
        message = self._ready.popleft()
        if "ended" in message:
            raise RemoteEnvironmentError(f"ended its process ({lifeline.ending(message['ended'])})")
        return message

    def close(self) -> None:
        """Shut it, also while another thread waits for an answer; the episode's processes are killed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class RemoteEnvironment:
    """The methods of an environment whose episode is in another process."""

    def __init__(self, link: Link, arguments: Mapping[str, object], seed: int):
        self._link = link
        facts = link.call("make", seed, dict(arguments))
        assert isinstance(facts, list)
        self.bounds_its_steps, has_before_reset = facts
        self.before_reset: Callable[[], object] | None = self._prepare if has_before_reset else None

    def reset(self, seed: int, options: Mapping[str, object] | None) -> object:
        return self._link.call("reset", {"seed": seed, "options": options})

    def step(self, action: str) -> object:
        return self._link.call("step", action)

    def close(self) -> None:
        self._link.call("close")

    def _prepare(self) -> None:
        self._link.call("before_reset")


class HostedEnvironment(Environment):
    """One episode, in a process of its own.

    Args:
        seed: of ``random`` and numpy's generator in that process.
    """

    hang_hint = ""

    def __init__(self, host: EnvironmentHost, arguments: Mapping[str, object], timeout: float, seed: int):
        super().__init__(self._start, arguments, timeout)
        self._host, self._seed = host, seed
        self._link: Link | None = None
        self._is_given_up = False

    async def make(self) -> None:
        """Make it in a process of its own; waiting for that process has no time limit."""
        await self._call("starting its process", None, self._connect)
        await super().make()

    async def close(self) -> None:
        """Call the environment's ``close``, and end its process."""
        try:
            await super().close()
        finally:
            self._kill()

    def _connect(self) -> None:
        self._link = self._host.episode()
        if self._is_given_up:  # while this thread waited
            self._kill()

    def _start(self, **arguments: object) -> RemoteEnvironment:
        assert self._link is not None
        return RemoteEnvironment(self._link, arguments, self._seed)

    async def _call(
        self, what: str, limit: float | None, function: Callable[..., object], /, *arguments: object, **named: object
    ) -> Any:
        try:
            return await super()._call(what, limit, function, *arguments, **named)
        except asyncio.CancelledError:
            self._kill()
            raise
        except EnvironmentFailure as failure:
            if not isinstance(failure.__cause__, RemoteEnvironmentError):  # a call is still in flight
                self._kill()
            raise

    def _kill(self) -> None:
        self._is_given_up = True
        link, self._link, self._it = self._link, None, None
        if link is not None:
            self._host.release(link)


@functools.cache
def host_of(path: str) -> EnvironmentHost:
    """The host of an environment in this process."""
    return EnvironmentHost(path)
