"""A server started here: up before anybody asks it, gone when this process goes, its last words in the error."""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from verl import env
from verl.rollout.lost import EngineLostError
from verl.rollout.server.client import HttpClient

POLL_SECONDS = 0.2
LAST_LINES = 12
KILL_SECONDS = 10.0
END_WITH_STDIN = "--end-with-stdin"
"""Makes a host of ours end when its standard input does: the system closes it however this process ends."""


class ServerProcess:
    """A server in a child process.

    Args:
        command: starts it.
        port: on this machine, on which it will listen.
        environment: beside this process's own.
        name: for messages.
    """

    def __init__(self, command: Sequence[str], port: int, environment: Mapping[str, str] | None = None, name: str = ""):
        self.url = f"http://127.0.0.1:{port}"
        self.name = name or command[0]
        self._said: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**env.whole(), **(environment or {})},
        )
        threading.Thread(target=self._listen, name=f"output of {self.name}", daemon=True).start()
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def wait_until_up(self, seconds: float) -> None:
        """Return once it answers.

        Raises:
            EngineLostError: it ended, or did not come up in time; with the last lines of its output.
        """
        client = HttpClient(self.url)
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(EngineLostError):
                if (await client.ask("GET", "/health", timeout=5.0)).status < 500:
                    return
            if not self.is_alive:
                raise EngineLostError(self.obituary)
            if time.monotonic() > deadline:
                raise EngineLostError(
                    f"{self.name} did not come up within {seconds:g} s: {self.last_words}",
                    key="actor_rollout_ref.rollout.server.max_start_wait_time",
                )
            await asyncio.sleep(POLL_SECONDS)

    @property
    def obituary(self) -> str:
        """Of a process that has ended: how, and what it said last."""
        status = self.process.returncode
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self.name} ended with {how}; it said last: {self.last_words}"

    @property
    def last_words(self) -> str:
        return "\n".join(self._said) or "it said nothing"

    def close(self) -> None:
        """End it; it gets some seconds for it."""
        if self.is_alive:
            self.process.terminate()
            try:
                self.process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        atexit.unregister(self.close)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self.process.stdout:
                self._said.append(line.rstrip())
