"""The walls, put up in three steps: around the whole pool, around one run, and around the program itself.

Each step is done by the process that then lives behind it, and none can be taken back. The program's own step ends with
no capability, no way to gain one, and the list of system calls; only then is a line of its code read.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.sandbox.inside import root
from verl.sandbox.kernel import calls, landlock, seccomp

INSIDE_ID = 1000
NOBODY = 65534
MIB = 1 << 20
SIGNALS = 256
"""Queued signals and timers of one program; the kernel counts them for a user."""
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21


@dataclass(frozen=True)
class Walls:
    """Which layers stand, and what can be seen behind them."""

    missing: Mapping[str, str]
    """Layers that are not there, with the reason."""
    paths: Sequence[str]
    """What a program may read."""
    landlock: int
    """The version of Landlock that is used; 0 where it is missing."""

    def has(self, layer: str) -> bool:
        return layer not in self.missing


def raise_outer(
    paths: Sequence[str],
    without: Sequence[str],
    accept: Callable[[Mapping[str, str]], None],
    newest_landlock: int = landlock.NEWEST,
    folders: Sequence[str] = (),
) -> Walls:
    """Put the calling process into namespaces of its own; its next child is the first of a new pid namespace.

    Args:
        without: layers that are not to be used even if they are there.
        accept: receives what is missing (layer: reason), and raises to refuse.
        newest_landlock: the version of Landlock of an older kernel that is to be taken for this one.
        folders: names in the root that lead into the temporary folder.

    Raises:
        OSError: a wall that the kernel offers could not be put up.
    """
    missing = dict.fromkeys(without, "left out on purpose")
    shown = root.visible(paths)
    version = 0

    def try_landlock() -> None:
        nonlocal version
        offered = landlock.offered(alone="namespaces" in missing, newest=newest_landlock)
        _try_in_child(lambda: _restrict(shown, root.TEMPORARY, offered))
        version = offered

    for name, probe in (
        ("namespaces", lambda: _try_in_child(lambda: _enter_namespaces(shown, folders))),
        ("landlock", try_landlock),
        ("seccomp", lambda: _try_in_child(_install_filter)),
    ):
        try:
            if name not in missing:
                probe()
        except OSError as error:
            missing[name] = error.strerror or str(error)
    accept(missing)
    if "namespaces" not in missing:
        _enter_namespaces(shown, folders)
        shown = [root.place(path) for path in shown]
    return Walls(missing, shown, version)


def enter_run(walls: Walls) -> int | None:
    """For the first process of a run: a mount namespace that shows this run's processes to it alone.

    Returns:
        a descriptor of that /proc; None where the processes of a program cannot be watched, which then gets only one.

    Raises:
        OSError: they cannot be watched, and there is no filter that keeps the program from starting more.
    """
    calls.prctl(calls.PR_SET_DUMPABLE, 0)
    if not walls.has("namespaces"):
        return None
    calls.unshare(calls.CLONE_NEWNS)
    try:
        return root.mount_processes()
    except OSError as error:  # a container that hides parts of /proc: the kernel lets nobody mount a whole one
        if not walls.has("seccomp"):
            why = "nothing bounds a program's processes without seccomp where /proc cannot be mounted"
            raise OSError(error.errno, f"{why}: {error}") from error
        root.hide_processes()
        return None


def enter_program(walls: Walls, limits: Mapping[str, Any], proc: int | None, folder: str, parent: int) -> None:
    """For the program's process: its temporary folder, its limits, and the end of all privileges.

    Args:
        parent: init, as the program's process sees it.
        folder: its temporary folder, where it cannot have a file system of its own.
    """
    if walls.has("namespaces"):
        calls.unshare(calls.CLONE_NEWNS)
        root.mount_temporary(limits["disk_mb"], INSIDE_ID)
    if proc is not None:
        _enter_user_namespace(proc, INSIDE_ID, INSIDE_ID)  # of its own, because processes are counted per namespace
        _write(proc, "oom_score_adj", "1000")  # if memory runs out, this process goes, and not the training
        os.close(proc)
    os.chdir(folder)
    _set_limits(limits, count_processes=proc is not None)
    calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
    calls.drop_capabilities()
    calls.prctl(calls.PR_SET_DUMPABLE, int(proc is not None))  # init looks at its descriptors, and nobody else can
    # Without a pid namespace nothing else ends the program when init is killed. The filter keeps it from being undone.
    calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError(errno.ESRCH, "init is gone")
    if walls.has("landlock"):
        _restrict(walls.paths, folder, walls.landlock)
    if walls.has("seccomp"):
        seccomp.install(seccomp.build(None if proc is not None else os.getpid()))


def _restrict(paths: Sequence[str], folder: str, version: int) -> None:
    """Landlock: nothing but these paths and devices, and this folder to write to."""
    calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
    devices = [path for path in root.DEVICES if os.path.exists(path)]
    landlock.restrict([path for path in paths if not os.path.islink(path)], [folder], devices, version)


def _install_filter() -> None:
    calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.build())


def address_space() -> int:
    """Bytes of address space that this process has already."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _set_limits(limits: Mapping[str, Any], count_processes: bool) -> None:
    if not limits["session"]:  # whose cells have a wall-clock limit each, and no bound on their sum
        seconds = math.ceil(limits["seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    if count_processes:  # elsewhere the kernel would count all processes of this user on the machine
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"],) * 2)
    for kind, value in (
        (resource.RLIMIT_AS, limits["base"] + limits["memory_mb"] * MIB),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * MIB),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 1),  # 0 would not keep a crash from the machine's own handler, if it has one
        (resource.RLIMIT_SIGPENDING, SIGNALS),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _enter_user_namespace(proc: int, user: int, group: int) -> None:
    """A user namespace in which this process is an ordinary user outside; for now with all capabilities inside."""
    calls.unshare(calls.CLONE_NEWUSER)
    calls.prctl(calls.PR_SET_DUMPABLE, 1)  # else its own files in /proc belong to root
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE_ID} {user} 1"),
        ("gid_map", f"{INSIDE_ID} {group} 1"),
    ):
        _write(proc, name, text)


def _write(proc: int, name: str, text: str) -> None:
    """Write to a file of this process in /proc."""
    file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _enter_namespaces(shown: Sequence[str], folders: Sequence[str]) -> None:
    """User, mount, network, ipc and, for the children, pid namespace; outside, this process becomes an ordinary user.

    Root builds the file system first, because nobody else may read the files in root's folders; then it becomes nobody.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    privileged = os.geteuid() == 0 and _has_capabilities(_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN)
    if not privileged:
        _enter_user_namespace(proc, os.geteuid(), os.getegid())
    calls.unshare(calls.CLONE_NEWNS | calls.CLONE_NEWNET | calls.CLONE_NEWIPC | calls.CLONE_NEWUTS)
    root.enter(shown, folders)
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        calls.prctl(calls.PR_SET_DUMPABLE, 1)
        _enter_user_namespace(proc, NOBODY, NOBODY)
    calls.unshare(calls.CLONE_NEWPID)
    os.close(proc)


def _try_in_child(step: Callable[[], None]) -> None:
    """Whether a step works, found out by a child, because it cannot be taken back. Raises OSError where it does not."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        message = b"it ended without a word"
        try:
            step()
            grandchild = os.fork()  # the first of a new pid namespace
            if grandchild == 0:
                os._exit(0)
            os.waitpid(grandchild, 0)
            message = b""
        except OSError as error:
            message = str(error.strerror or error).encode()
        except Exception as error:  # our own bug: reported like a wall that the kernel refuses, at this boundary
            message = f"{type(error).__name__}: {error}".encode()
        finally:
            os.write(theirs, message)
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    if message:
        raise OSError(0, message.decode("utf-8", "replace"))


def _has_capabilities(*required: int) -> bool:
    effective = calls.capabilities()
    return all(effective >> capability & 1 for capability in required)
