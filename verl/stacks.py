"""The stacks of running processes, on demand, and their signs of life: what a process does, seen without its help.

A process that calls `listen` writes its stacks, on a signal and even while native code holds the interpreter, into a
file in memory that belongs to it. Any process of the same user reads them there. Linux only; elsewhere nothing is read.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 7
NAME, MARKS = "verl-stacks", "verl-marks"
ANSWER_SECONDS, POLL_SECONDS = 1.0, 0.02
MOST_BYTES, LONGEST_NAME = 1 << 20, 100
"""What is read of a process, which may be a program of a model's that says what it likes."""
STATES = {
    "R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped by a signal", "t": "traced",
    "Z": "ended, and not collected", "X": "ended", "I": "idle",
}  # fmt: skip
STUCK = ("D", "T", "t", "Z", "X")
"""States in which a process makes no progress whatever it is meant to do."""

_file: int | None = None
_marks: int | None = None
_last_mark: float | None = None
_MARK = struct.Struct("d")


@dataclass(frozen=True)
class Process:
    """What was seen of a process.

    Args:
        pid: its number on its node.
        name: of the worker in it, or its command.
        state: a letter of `STATES`; empty where the process is gone.
        stacks: of all its threads; empty where it does not listen or did not answer.
        node: address of its node; empty for this one.
        silent: seconds since its last `mark`; None: it has made none.
    """

    pid: int
    name: str
    state: str
    stacks: str = ""
    node: str = ""
    silent: float | None = None

    @property
    def is_stuck(self) -> bool:
        return not self.state or self.state in STUCK

    def __str__(self) -> str:
        where = f" on node {self.node}" if self.node else ""
        return f"{self.name} (process {self.pid}{where}, {STATES.get(self.state, self.state or 'gone')})"


def listen(name: str = "") -> None:
    """From here on this process, and what it forks, answers with its stacks; ``name`` is for people."""
    global _file, _marks
    if _file is None and sys.platform == "linux":
        _file, _marks = os.memfd_create(f"{NAME}:{name}"), os.memfd_create(MARKS)
        faulthandler.register(SIGNAL, _file, all_threads=True, chain=False)


def mark() -> None:
    """A heartbeat: this process makes progress, as it has drawn tokens or answered a request."""
    global _last_mark
    _last_mark = time.monotonic()
    if _marks is not None:
        os.pwrite(_marks, _MARK.pack(_last_mark), 0)


def silence_of(pid: int) -> float | None:
    """Seconds since a process of this node has last made a `mark`; None where it has made none that can be read."""
    last = _last_mark if pid == os.getpid() else None
    with suppress(OSError, struct.error):
        place = None if pid == os.getpid() else _file_of(pid, MARKS)
        if place is not None:
            with place.open("rb") as file:
                (last,) = _MARK.unpack(file.read(_MARK.size))
    return None if last is None else max(0.0, time.monotonic() - last)


def look_at(pids: Iterable[int], names: dict[int, str] | None = None, node: str = "") -> list[Process]:
    """State and stacks of processes of this node, one after the other."""
    names = names or {}
    return [
        Process(pid, names.get(pid) or name_of(pid), state_of(pid), stacks_of(pid), node, silence_of(pid))
        for pid in pids
    ]


def stacks_of(pid: int) -> str:
    """The stacks of a process that listens; empty if it does not answer."""
    with suppress(OSError, ValueError):
        place = _answers_at(pid)
        if place is not None:
            before = place.stat().st_size
            os.kill(pid, SIGNAL)
            _settle(place, before)
            with place.open("rb") as file:
                file.seek(before)
                return file.read(MOST_BYTES).decode(errors="replace").strip()
    return ""


def state_of(pid: int) -> str:
    """The letter that the kernel gives the state of a process; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def name_of(pid: int) -> str:
    """What a process calls itself for people, else the first words of its command."""
    with suppress(OSError):
        place = _file_of(pid)
        named = "" if place is None else os.readlink(place).partition(":")[2].partition(":")[2].partition(" (")[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        return " ".join((named or " ".join(Path(word).name for word in words[:2])).split())[:LONGEST_NAME]
    return ""


def _answers_at(pid: int) -> Path | None:
    """The file in which a process answers; None for one whom the signal would end."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return _file_of(pid) if caught >> (SIGNAL - 1) & 1 else None


def _file_of(pid: int, name: str = f"{NAME}:") -> Path | None:
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(place).startswith(f"/memfd:{name}"):
                return place
    return None


def _settle(place: Path, before: int) -> None:
    """Wait until an answer is there and grows no more."""
    size, end = before, time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        size, last = place.stat().st_size, size
        if size == last > before:
            return
