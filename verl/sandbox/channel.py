"""The caller's end of one run: sends the request, collects the answers, and knows when everything of it is gone."""

from __future__ import annotations

import socket
import time
from typing import Any

from verl.errors import SandboxError
from verl.sandbox import frames
from verl.sandbox.limits import Limits

HANG_SECONDS = 10.0
"""How much longer than its limit a run may take to answer. Init keeps the limit itself; this guards against a machine
so busy, or a kernel so stuck, that init does not get to it."""
GONE_SECONDS = 10.0
PIECE = 1 << 18


class Channel:
    """One run. Closing it kills the run."""

    def __init__(self, connection: socket.socket, limits: Limits):
        self._socket, self._limits = connection, limits
        longest = 6 * 3 * limits.output_kb * 1024 + (1 << 16)  # three texts, in which each byte may be six of JSON
        self._frames = frames.Frames(longest)
        self._answers: list[dict[str, Any]] = []

    def send(self, message: object) -> None:
        """Raises SandboxError where the run is gone."""
        self._socket.settimeout(HANG_SECONDS)
        try:
            self._socket.sendall(frames.pack(message))
        except BrokenPipeError:
            return  # it has said why, if it could: that is the next thing to be read
        except OSError as error:
            raise SandboxError(f"the sandbox does not take its program: {error}") from error

    def receive(self) -> dict[str, Any]:
        """The next answer. Raises SandboxError where there is none within the limit, or the sandbox broke."""
        deadline = time.monotonic() + self._limits.seconds + HANG_SECONDS
        while not self._answers:
            piece = self._read(deadline)
            if not piece:
                raise SandboxError("the sandbox ended without an answer")
            self._answers += self._frames.feed(piece)
        answer = self._answers.pop(0)
        if "broken" in answer:
            raise SandboxError(f"the sandbox could not be set up: {answer['broken']}")
        return answer

    def finish(self) -> None:
        """Wait until every process of the run is gone: the keeper closes its copy of the socket only then."""
        deadline = time.monotonic() + GONE_SECONDS
        self._socket.shutdown(socket.SHUT_WR)
        while self._read(deadline):
            continue
        self.close()

    def close(self) -> None:
        self._socket.close()

    def _read(self, deadline: float) -> bytes:
        left = deadline - time.monotonic()
        try:
            self._socket.settimeout(max(left, 0.001))
            return self._socket.recv(PIECE)
        except TimeoutError:
            self.close()
            raise SandboxError(
                f"the sandbox did not answer {HANG_SECONDS:g} s after the limit of its program",
                fix="The machine is overloaded: fewer programs at once, or a longer limit.",
            ) from None
        except ConnectionResetError:
            return b""
