"""What the processes of a run hold open, looked at from one of them, and written down for the test that started it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SHARED = Path("/dev/shm")
SHM = f" {SHARED}/"


@dataclass
class Seen:
    """What is open.

    Args:
        listening: (program, address) of every socket that accepts connections from a network.
        sockets: path of a unix socket, or its abstract name with ``@`` -> `facts`.
        names: path in shared memory or in the folder for temporary files -> `facts`.
        writes: path of a file elsewhere that a process may write to -> `facts`.
        processes: numbers of all that were looked at.
        closed: programs that this process may not look into.
    """

    listening: set[tuple[str, str]] = field(default_factory=set)
    sockets: dict[str, list[int]] = field(default_factory=dict)
    names: dict[str, list[int]] = field(default_factory=dict)
    writes: dict[str, list[int]] = field(default_factory=dict)
    processes: set[int] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)

    def add(self, other: dict[str, Any]) -> None:
        """What another process of the run wrote down."""
        self.listening |= {(program, address) for program, address in other["listening"]}
        self.closed |= set(other["closed"])
        self.processes |= set(other["processes"])
        for kind in ("sockets", "names", "writes"):
            getattr(self, kind).update(other[kind])


def facts(path: str) -> list[int]:
    """Mode with the type of the file, and owner; nothing where there is no such file (any more)."""
    try:
        found = os.lstat(path)
    except OSError:
        return []
    return [found.st_mode, found.st_uid]


def names() -> dict[str, list[int]]:
    """What lies in shared memory and in the folder for temporary files."""
    places = {SHARED, Path(tempfile.gettempdir())}
    found = {str(path): facts(str(path)) for place in places if place.is_dir() for path in place.iterdir()}
    return {path: entry for path, entry in found.items() if entry}


def names_of_others(names: dict[str, list[int]], own: set[int]) -> set[str]:
    """Which of them programs outside of this run have open or mapped, and those that are gone by now."""
    shared = {path for path in names if path.startswith(f"{SHARED}/")}
    if not shared:
        return set()
    others = [process for process in psutil.process_iter() if process.pid not in own]
    held = {place for process in others for place in _held(process.pid)}
    return {path for path in shared if path in held or not os.path.lexists(path)}


def _held(pid: int) -> set[str]:
    """Paths in shared memory that a process has open or mapped; none of a process that may not be looked into."""
    held: set[str] = set()
    with suppress(OSError):
        held |= {
            line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if SHM in line
        }
    with suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                held.add(os.readlink(descriptor.path))
    return held


def look(starter: int) -> Seen:
    """Look at the child of process ``starter`` that this process descends from, and at all below that."""
    root = psutil.Process()
    while root.ppid() != starter:
        root = psutil.Process(root.ppid())
    seen, run = Seen(names=names()), [root, *root.children(recursive=True)]
    for path in names_of_others(seen.names, {process.pid for process in run}):
        del seen.names[path]
    for process in run:
        try:
            _look_into(process, seen)
            seen.processes.add(process.pid)
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            seen.closed.add(process.name())
    return seen


def _look_into(process: psutil.Process, seen: Seen) -> None:
    program = _program(process)
    for entry in process.net_connections("all"):
        if isinstance(entry.laddr, str):
            seen.sockets.update({entry.laddr: facts(entry.laddr)} if entry.laddr else {})
        elif entry.status == psutil.CONN_LISTEN or (entry.status == psutil.CONN_NONE and not entry.raddr):
            seen.listening.add((program, entry.laddr.ip.removeprefix("::ffff:")))  # IPv4 through a socket of both
    temporary = (f"{SHARED}/", f"{tempfile.gettempdir()}/")
    for file in process.open_files():
        if file.mode != "r" and not file.path.startswith(temporary):
            seen.writes[file.path] = facts(file.path)


def _program(process: psutil.Process) -> str:
    """Its name; ``ray::*`` for whatever a worker of Ray is doing."""
    name = process.name()
    return "ray::*" if name.startswith("ray::") and not name.endswith("Agent") else name


def write_down(folder: str, starter: int) -> None:
    """Look, and leave it in a file of this process in ``folder``, in place of what it saw before."""
    seen = vars(look(starter)).items()
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in seen}
    file = Path(folder, f"{os.getpid()}.json")
    file.with_suffix(".part").write_text(json.dumps(plain))
    file.with_suffix(".part").rename(file)


def at_every_step(folder: str, starter: int) -> None:
    """Write it down in this process before each step of its optimizer; the last one stays."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(lambda *_: write_down(folder, starter))


def read(folder: Path) -> Seen:
    """What the processes of a run wrote down, taken together."""
    files = sorted(folder.glob("*.json"))
    assert files, f"nobody looked: {folder} is empty"
    seen = Seen()
    for file in files:
        seen.add(json.loads(file.read_text()))
    return seen


def ends(pids: list[int], seconds: float = 60.0) -> bool:
    """Whether these processes are gone after a while; zombies are."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_there(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
