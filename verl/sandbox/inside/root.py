"""The file system that a program sees: an empty root with the interpreter, its libraries, a few devices; read-only."""

from __future__ import annotations

import os
from collections.abc import Sequence

from verl.sandbox.kernel import calls

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Not /dev/zero: mapped, it is memory that is shared and that no limit counts."""
LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/usr/local/lib")
TEMPORARY = "/tmp"
MOVED = "/packages"
PROC = "/proc"
_STAGE = "/tmp"
_HARMLESS = calls.MS_NOSUID | calls.MS_NODEV


def visible(paths: Sequence[str]) -> list[str]:
    """The paths that exist, without those that lie below another one."""
    present = sorted({path for path in (*LIBRARIES, *paths) if os.path.exists(path)}, key=lambda path: path.count("/"))
    kept: list[str] = []
    for path in present:
        if not any(path == one or path.startswith(one + "/") for one in kept if not os.path.islink(one)):
            kept.append(path)
    return kept


def place(path: str) -> str:
    """Where a path of the machine is shown: a program's own /tmp would hide the machine's."""
    return MOVED + path if path.startswith(f"{TEMPORARY}/") else path


def enter(paths: Sequence[str], folders: Sequence[str] = ()) -> None:
    """Make an empty root with these paths in it, at their `place`, this process's root. Needs a mount namespace.

    Args:
        folders: names in the root, free there, that lead to the same name in the temporary folder.
    """
    calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in paths if not os.path.islink(path)]
    links = [(path, os.readlink(path)) for path in paths if os.path.islink(path)]
    devices = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in DEVICES if os.path.exists(path)]
    proc = os.open(PROC, os.O_PATH | os.O_CLOEXEC)
    calls.mount("sandbox", _STAGE, "tmpfs", _HARMLESS, "mode=0755,size=1m,nr_inodes=4096")
    for path, fd in sources:
        _bind(fd, place(path), calls.ATTR_RDONLY | calls.ATTR_NOSUID | calls.ATTR_NODEV)
    for path, fd in devices:
        _bind(fd, path, calls.ATTR_NOSUID | calls.ATTR_NOEXEC)
    for path, target in links:
        os.makedirs(os.path.dirname(_STAGE + place(path)), exist_ok=True)
        os.symlink(place(target), _STAGE + place(path))
    for name in folders:
        os.symlink(TEMPORARY + name, _STAGE + name)
    os.mkdir(_STAGE + TEMPORARY)
    _bind(proc, PROC, 0)
    calls.pivot_root(_STAGE)
    calls.mount(None, "/", None, calls.MS_REMOUNT | calls.MS_BIND | calls.MS_RDONLY | _HARMLESS)


def mount_temporary(megabytes: int, owner: int) -> None:
    """A private temporary folder of this size."""
    options = f"mode=0700,size={megabytes}m,nr_inodes={1024 + 64 * megabytes},uid={owner},gid={owner}"
    calls.mount("tmp", TEMPORARY, "tmpfs", _HARMLESS, options)


def mount_processes() -> int:
    """A folder that shows the processes of this pid namespace, reachable through this descriptor only.

    Raises OSError where the machine hides parts of its own /proc, as containers do: the kernel then allows no new one.
    """
    calls.mount("proc", PROC, "proc", _HARMLESS | calls.MS_NOEXEC)
    folder = os.open(PROC, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    hide_processes()
    return folder


def hide_processes() -> None:
    """Nothing in /proc for lookups by path."""
    calls.mount("none", PROC, "tmpfs", calls.MS_RDONLY | _HARMLESS | calls.MS_NOEXEC, "mode=0555,size=4k,nr_inodes=2")


def _bind(fd: int, path: str, flags: int) -> None:
    """Show what ``fd`` is open on at ``path`` of the new root. By descriptor: the stage may hide the path itself."""
    source, target = f"{PROC}/self/fd/{fd}", _STAGE + path
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))
    calls.mount(source, target, None, calls.MS_BIND | calls.MS_REC)
    if flags:
        calls.set_mount_flags(target, flags)
    os.close(fd)
