"""Walls around a process of our own that reads untrusted text: from now on it reads, computes, and answers on its pipe.

For graders, whose code is the library's and whose input is the policy's. Python's own guard, an audit hook, is passed
by any Python code that runs there (``_posixsubprocess``, C functions); the kernel's walls are not. There are no
namespaces: the process was started before, with its pipes.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from pathlib import Path

from verl.sandbox.inside import root
from verl.sandbox.kernel import calls, landlock, seccomp

PACKAGES = ("site-packages", "dist-packages")


def seal(memory_mb: int) -> dict[str, str]:
    """Bound this process's memory and take away programs, connections, signals, writing, and files that are no library.

    Cannot be undone. Threads that run already are held by the filter, too, and by Landlock are not.

    Returns:
        the layers that this machine lacks, with the kernel's reason; what they would keep away is then not kept away.
    """
    size = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    missing = {}
    for name, wall in (("landlock", _keep_files), ("seccomp", _keep_calls)):
        try:
            calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
            wall()
        except (OSError, AttributeError) as error:  # another kernel, or a C library without these calls
            missing[name] = str(error)
    return missing


def _keep_files() -> None:
    landlock.restrict(root.visible(_libraries()), [], [], landlock.version())


def _keep_calls() -> None:
    seccomp.install(seccomp.build(os.getpid(), read_only=True), all_threads=True)


def _libraries() -> list[str]:
    """The interpreter, the installed packages and this one: what an import may still need."""
    packages = [path for path in sys.path if Path(path).name in PACKAGES]
    this = str(Path(__file__).resolve().parents[1])
    paths = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *packages, this, "/usr/share/zoneinfo"]
    return [path for path in paths if path not in ("/", "/usr", "/usr/local")]
