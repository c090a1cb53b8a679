"""seccomp: the list of system calls that a program may make; every other one fails with EPERM.

A list of what is allowed, so that a call which a later kernel adds is refused without anybody having heard of it. Calls
whose arguments matter are looked into: ``clone`` must make no namespace; ``prctl``, ``ioctl`` and ``fcntl`` do only
harmless things, among which are no locks, no leases and no signals; ``prlimit`` reads only one's own; ``mmap`` and
``madvise`` make no memory that no limit counts. No socket can be made at all (``socketpair`` can: its ends lead nowhere
else), and no descriptor sent through one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from dataclasses import dataclass, field
from functools import lru_cache

from verl.sandbox.kernel import calls
from verl.sandbox.kernel.numbers import ARCHITECTURES, NUMBERS

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_SYSCALL, _ARCH, _ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_CLONE_THREAD = 0x00010000
_SET_MODE_FILTER = 1
_SECCOMP = {"x86_64": 317, "aarch64": 277}

_PRCTL_OPTIONS = (2, 3, 15, 16, 21, 23, 38, 39, 0x53564D41)
"""Parent-death signal (read), dumpable (read), thread name, seccomp mode, capability (read), no-new-privs,
names of memory areas."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal, its size, bytes to read, non-blocking, close-on-exec."""
_FCNTLS = (0, 1, 2, 3, 1030, 1032)
"""Copies of a descriptor, its flags, the flags of its file (read), the size of a pipe (read)."""
_SET_FLAGS, _O_ASYNC = 4, 0x2000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000
_MADVICE = (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23, 102, 103)
"""All but paging out (the pages stay, and no longer count as resident), merging with pages of others, and poison."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FOLDER_CHANGES = (
    "creat", "link", "linkat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "rmdir", "symlink", "symlinkat",
    "unlink", "unlinkat", "truncate", "fallocate",
)  # fmt: skip
_NEW_PROCESSES = ("fork", "vfork", "execve", "execveat")
_SIGNALS = ("kill", "tkill", "tgkill")
_FILE_CHANGES = ("chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "utimensat", "truncate")
"""What Landlock does not watch over (truncate: by path, before its third version)."""


@dataclass
class _Program:
    """Instructions of classic BPF; ``code`` ends each rule with a return."""

    code: list[tuple[int, int, int, int]] = field(default_factory=list)

    def add(self, operation: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self.code.append((operation, if_true, if_false, value & 0xFFFFFFFF))

    def answer(self, action: int) -> None:
        self.add(_RETURN, action)

    def when(self, number: int, rule: list[tuple[int, int, int, int]]) -> None:
        """``rule``, which must return on every path, where the call has this number."""
        self.add(_JEQ, number, 0, len(rule))
        self.code += rule

    def packed(self) -> bytes:
        return b"".join(struct.pack("=HBBI", *one) for one in self.code)


@lru_cache(maxsize=2)
def build(pid: int | None = None, read_only: bool = False) -> bytes:
    """The filter for this machine. With ``pid`` it makes up for missing namespaces: a program cannot start processes,
    signals only this one, and cannot change modes and times of files. ``read_only``: it opens no file to write, and
    makes, renames and removes none.

    Raises OSError where the numbers of this machine are unknown.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"seccomp: the system calls of {machine} are not listed")
    numbers = NUMBERS[machine]
    program = _Program()
    program.add(_LOAD, _ARCH)
    program.add(_JEQ, ARCHITECTURES[machine], 1, 0)
    program.answer(_KILL)
    program.add(_LOAD, _SYSCALL)
    program.add(_JGE, _X32_BIT, 0, 1)
    program.answer(_ERRNO | errno.ENOSYS)
    special = _special_rules(numbers, pid)
    if read_only:
        special |= _read_only_rules(numbers)
    for number, rule in special.items():
        program.when(number, rule)
    plain = [number for number in numbers.values() if number not in special]
    for number in sorted(plain):
        program.when(number, [(_RETURN, 0, 0, _ALLOW)])
    program.answer(_ERRNO | errno.EPERM)
    return program.packed()


def install(program: bytes, all_threads: bool = False) -> None:
    """Put the filter on this thread and all it will start. Needs `PR_SET_NO_NEW_PRIVS`; cannot be undone.

    Args:
        all_threads: on the other threads of this process, too.

    Raises:
        OSError: the kernel has no filters, or a thread has one of its own.
    """
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    number, flags = _SECCOMP[platform.machine()], int(all_threads)
    if calls.syscall("seccomp", number, _SET_MODE_FILTER, flags, ctypes.create_string_buffer(header)):
        raise OSError(errno.ESRCH, "seccomp: a thread of this process does not take the filter")


def _special_rules(numbers: dict[str, int], pid: int | None) -> dict[int, list[tuple[int, int, int, int]]]:
    """Rules of the calls whose arguments decide, by number."""
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    missing = (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    first, second, third, fourth = ((_LOAD, 0, 0, _ARGUMENTS + 8 * place) for place in range(4))
    rules = {
        numbers["clone"]: [first, (_JSET, 0, 1, _NEW_NAMESPACES), deny, allow],
        # Its flags lie in memory, where a filter cannot look: the C library falls back to clone.
        numbers["clone3"]: [missing],
        numbers["prctl"]: [first, *_any_of(_PRCTL_OPTIONS), deny],
        numbers["ioctl"]: [second, *_any_of(_IOCTLS), deny],
        numbers["fcntl"]: [
            second,
            *_any_of(_FCNTLS),
            (_JEQ, 0, 3, _SET_FLAGS),
            third,
            (_JSET, 1, 0, _O_ASYNC),
            allow,
            deny,
        ],
        # Memory that is shared and has no file counts only while it is mapped and present; huge pages never do.
        numbers["mmap"]: [
            fourth,
            (_JSET, 3, 0, _MAP_HUGETLB),
            (_JSET, 0, 1, _MAP_ANONYMOUS),
            (_JSET, 1, 0, _MAP_SHARED),
            allow,
            deny,
        ],
        numbers["madvise"]: [third, *_any_of(_MADVICE), deny],
        numbers["prlimit64"]: [first, (_JEQ, 0, 1, 0), allow, deny],
    }
    if pid is not None:
        rules[numbers["clone"]] = [
            first,
            (_JSET, 1, 0, _CLONE_THREAD),
            deny,
            (_JSET, 0, 1, _NEW_NAMESPACES),
            deny,
            allow,
        ]
        rules |= {numbers[name]: [deny] for name in (*_NEW_PROCESSES, *_FILE_CHANGES) if name in numbers}
        rules |= {numbers[name]: [first, (_JEQ, 0, 1, pid), allow, deny] for name in _SIGNALS}
    return rules


def _read_only_rules(numbers: dict[str, int]) -> dict[int, list[tuple[int, int, int, int]]]:
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    rules = {numbers[name]: [deny] for name in _FOLDER_CHANGES if name in numbers}
    for name, place in (("open", 1), ("openat", 2)):
        if name in numbers:
            flags = (_LOAD, 0, 0, _ARGUMENTS + 8 * place)
            rules[numbers[name]] = [flags, (_JSET, 1, 0, _WRITING), allow, deny]
    return rules


def _any_of(values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Allow where the loaded value is one of these; go on behind them otherwise."""
    rule: list[tuple[int, int, int, int]] = []
    for value in values:
        rule += [(_JEQ, 0, 1, value & 0xFFFFFFFF), (_RETURN, 0, 0, _ALLOW)]
    return rule
