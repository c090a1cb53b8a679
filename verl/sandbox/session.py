"""Cells of code that share their variables, as in a notebook: one process for all of them, until a limit ends it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from verl.sandbox.answers import to_outcome
from verl.sandbox.channel import Channel
from verl.sandbox.limits import Limits
from verl.sandbox.outcome import Outcome
from verl.sandbox.pool import Pool, temporary_folder

LOST = "its variables and files are lost"


class Session:
    """Variables, imports and temporary files stay from cell to cell. Between cells the process stands still.

    A cell that is stopped by a limit, or ends the interpreter, takes everything with it: the outcome's ``detail`` says
    so, and the next cell starts from scratch. It keeps a process, and no place of the pool, while it waits.

    Args:
        limits: of each cell; memory, processes and files are those of the whole session.

    Example:
        >>> with Session(pool) as session:
        ...     session.run("x = 20")
        ...     session.run("x + 1").stdout
        '21\\n'
    """

    def __init__(self, pool: Pool, limits: Limits | None = None):
        self._pool, self._limits = pool, limits or Limits()
        self._lock = threading.Lock()  # one block of code at a time; a slot of the pool comes after it
        self._channel: Channel | None = None
        self._folder = ExitStack()
        self._number = 0

    def run(self, code: str) -> Outcome:
        """Run one cell. Cells of one session run one after the other.

        Raises:
            SandboxError: as `Pool.run`.
        """
        with self._lock, self._pool.slot():
            channel = self._start()
            self._number += 1
            try:
                channel.send({"code": code, "number": self._number})
                answer = channel.receive()
            except BaseException:
                self._forget()
                raise
            outcome = to_outcome(answer, self._limits)
            if not answer["ended"]:
                return outcome
            self._forget(wait=True)
            detail = f"{outcome.detail or 'it ended the interpreter'}; {LOST}"
            return Outcome(**{**vars(outcome), "detail": detail})

    def close(self) -> None:
        """End its process. The next cell starts a new session."""
        with self._lock:
            self._forget(wait=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Channel:
        if self._channel is None:
            folder = self._folder.enter_context(temporary_folder(self._pool))
            self._channel = self._pool.open_channel(self._limits, {"kind": "session", "folder": folder})
        return self._channel

    def _forget(self, wait: bool = False) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            if wait:
                channel.finish()
            channel.close()
        self._folder.close()
