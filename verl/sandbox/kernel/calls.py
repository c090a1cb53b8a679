"""System calls that Python has no name for (or has only since 3.12), through the C library.

Everything raises OSError with the call's name. The C library is entered with the interpreter lock held: the processes
that use this have one thread, and a fork in between must not find the lock taken.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 1, 4, 24, 28
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
SECUREBITS_LOCKED_DOWN = 0b11101111
"""No root, no setuid fix-up, no ambient capabilities, each of them locked."""

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capget": 125, "capset": 126},
    "aarch64": {"pivot_root": 41, "capget": 90, "capset": 91},
}
_LANDLOCK = {"create_ruleset": 444, "add_rule": 445, "restrict_self": 446}
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_CAPABILITY_VERSION_3 = 0x20080522


def check(result: int, name: str) -> int:
    """The result of a call, or OSError with the call's name."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(name: str, number: int, *arguments: object) -> int:
    """A system call by number; integers travel as 64 bits, buffers as pointers."""
    c_arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check(_libc.syscall(ctypes.c_long(number), *c_arguments), name)


def landlock(step: str, *arguments: object) -> int:
    """One of Landlock's three calls; their numbers are the same on all machines."""
    return syscall(f"landlock_{step}", _LANDLOCK[step], *arguments)


def unshare(flags: int) -> None:
    check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
    check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return check(_libc.prctl(ctypes.c_int(option), *padded), f"prctl({option})")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    check(_libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount {kind or source or ''} on {target}")


def set_mount_flags(target: str, flags: int) -> None:
    """Add flags to a mount and to all below it; never takes one off, so it works in namespaces that may not."""
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
    syscall(f"mount_setattr {target}", _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, 32)


def umount(target: str) -> None:
    check(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root(root: str) -> None:
    """Make ``root`` the root folder and let go of the old one."""
    os.chdir(root)
    syscall("pivot_root", _number("pivot_root"), b".", b".")
    umount(".")
    os.chdir("/")


def capabilities() -> int:
    """The effective capabilities, as bits."""
    data = ctypes.create_string_buffer(24)
    syscall("capget", _number("capget"), _capability_header(), data)
    low, _, _, high, _, _ = struct.unpack("6I", data.raw)
    return low | high << 32


def drop_capabilities() -> None:
    """Give up every capability for good, those that an executed file would bring included."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    if not capabilities():
        return
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one that this kernel knows
            break
    prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED_DOWN)
    syscall("capset", _number("capset"), _capability_header(), ctypes.create_string_buffer(24))


def _capability_header() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))


def _number(name: str) -> int:
    table = _NUMBERS.get(platform.machine())
    if table is None:
        raise OSError(f"{name}: unknown on {platform.machine()}")
    return table[name]
