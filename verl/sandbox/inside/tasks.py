"""All processes of a program, as /proc of its pid namespace shows them: what they weigh, and how many work at once.

Resident pages are counted, pages that were swapped out, and what full pipes and sockets hold in the kernel. Memory that
shows nowhere else cannot be had: the filter refuses it (`verl.sandbox.kernel.seccomp`).
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

PIPE_BYTES, SOCKET_BYTES = 1 << 16, 1 << 18
"""Most that one end can hold: the kernel's own sizes (net.core.wmem_default and overhead), which it cannot change."""
HIDDEN_SHARE = 4
"""Descriptors are looked at one by one only where all of them together could hold this part of the memory limit."""
SEEN_WORKING = 3
LOWEST_PRIORITY = 19
_PAGE = resource.getpagesize()
_STATE, _THREADS, _SIZE, _RESIDENT, _CORE = 0, 17, 20, 21, 36


class Tasks:
    """The processes of one program, init not among them.

    Args:
        proc: descriptor of the /proc of its pid namespace.
        limits: of the program, with ``memory_mb``, ``processes`` and ``open_files``.
    """

    def __init__(self, proc: int, limits: Mapping[str, Any]):
        self._proc, self._limits = proc, limits
        stat = self._stat("self")
        assert stat is not None
        self._size, self._resident = int(stat[_SIZE]), int(stat[_RESIDENT])
        self._most_working = self._seen_working = 0
        self._core: int | None = None

    def watch(self) -> str:
        """The limit that they are over, as a word: memory or processes; empty where they are not."""
        stats = {pid: stat for pid in self._pids() if (stat := self._process(pid)) is not None}
        self._share_one_core(stats)
        most = self._limits["memory_mb"] << 20
        weight = sum(max(0, int(stat[_RESIDENT]) - self._resident) for stat in stats.values()) * _PAGE
        if sum(max(0, int(stat[_SIZE]) - self._size) for stat in stats.values()) > most:
            weight += sum(map(self._swapped, stats))
        if weight + self._held(stats, most // HIDDEN_SHARE) > most:
            return "memory"
        return "processes" if len(stats) > self._limits["processes"] + 1 else ""

    def _held(self, stats: Mapping[str, list[bytes]], hidden: int) -> int:
        """Bytes that pipes and sockets can hold; 0 where that is less than ``hidden``."""
        tables = [table for pid, stat in stats.items() for table in self._tables(pid, stat)]
        descriptors = {table: self._names(table) for table in tables}
        if sum(map(len, descriptors.values())) * SOCKET_BYTES <= hidden:
            return 0
        ends: set[str] = set()
        for table, names in descriptors.items():
            ends |= {self._link(f"{table}/{name}") for name in names}
        pipes = sum(end.startswith("pipe:") for end in ends)
        sockets = sum(end.startswith("socket:") for end in ends)
        return pipes * PIPE_BYTES + sockets * SOCKET_BYTES

    def _share_one_core(self, stats: Mapping[str, list[bytes]]) -> None:
        """Hold a program in which several tasks work at once to one core, and there to the share of one task.

        A program of one task needs none of this, and is left to the kernel, which moves it to where there is room.
        """
        tasks = [task for pid, stat in stats.items() for task in self._tasks(pid, stat)]
        working = [stat for _, stat in tasks if stat[_STATE] == b"R"]
        self._most_working = max(self._most_working, len(working))
        self._seen_working += len(working) > 1
        if self._seen_working < SEEN_WORKING:
            return
        if self._core is None and working:
            self._core = int(working[0][_CORE])
        for task, _ in tasks:
            with suppress(OSError):  # it is gone
                if self._core is not None:
                    os.sched_setaffinity(task, {self._core})
                os.setpriority(os.PRIO_PROCESS, task, _priority(self._most_working))

    def _pids(self) -> list[str]:
        return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]

    def _process(self, pid: str) -> list[bytes] | None:
        """`_stat` of a process. Where its first thread has ended and others go on, memory is shown for those alone."""
        stat = self._stat(pid)
        if stat is not None and int(stat[_THREADS]) > 1 and stat[_SIZE] == b"0":
            return max((one for _, one in self._tasks(pid, stat)), key=lambda one: int(one[_SIZE]), default=stat)
        return stat

    def _tasks(self, pid: str, stat: list[bytes]) -> list[tuple[int, list[bytes]]]:
        """Its threads."""
        if int(stat[_THREADS]) == 1:
            return [(int(pid), stat)]
        stats = [(int(name), self._stat(f"{pid}/task/{name}")) for name in self._names(f"{pid}/task")]
        return [(task, one) for task, one in stats if one is not None]

    def _tables(self, pid: str, stat: list[bytes]) -> list[str]:
        """Folders of its descriptors; a thread can have a table of its own."""
        if int(stat[_THREADS]) == 1:
            return [f"{pid}/fd"]
        return [f"{pid}/task/{name}/fd" for name in self._names(f"{pid}/task")]

    def _stat(self, task: str) -> list[bytes] | None:
        """What the kernel says of a task, from its state on; None for one that is gone."""
        text = self._read(f"{task}/stat")
        return text.rpartition(b")")[2].split() or None

    def _swapped(self, pid: str) -> int:
        """Bytes that were swapped out."""
        for line in self._read(f"{pid}/status").splitlines():
            if line.startswith(b"VmSwap:"):
                return int(line.split()[1]) << 10
        return 0

    def _read(self, path: str) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            return os.read(file, 1 << 13)
        except OSError:
            return b""
        finally:
            os.close(file)

    def _names(self, path: str) -> list[str]:
        """What is in a folder; where one of descriptors may not be looked at, as many names as there can be."""
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except PermissionError:
            stat = self._stat(os.path.dirname(path))
            if stat is None or stat[_SIZE] == b"0":  # it is about to be gone
                return []
            return [f"socket:{number}" for number in range(self._limits["open_files"])]
        except OSError:
            return []
        try:
            return os.listdir(folder)
        except OSError:
            return []
        finally:
            os.close(folder)

    def _link(self, path: str) -> str:
        """What a descriptor is; one that may not be looked at counts as a socket."""
        try:
            return os.readlink(path, dir_fd=self._proc)
        except PermissionError:
            return f"socket:{path}"
        except OSError:
            return "socket:" + path if "socket:" in path else ""


def _priority(working: int) -> int:
    """The priority at which ``working`` tasks together weigh as much as one: each step takes away a fifth."""
    return min(LOWEST_PRIORITY, math.ceil(math.log(max(working, 1)) / math.log(1.25)))
