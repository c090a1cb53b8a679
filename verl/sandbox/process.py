"""Starts the keeper of a pool and asks it for runs."""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from verl.errors import SandboxError
from verl.json_text import read_json
from verl.sandbox.inside import root
from verl.sandbox.layers import refusal

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
"""All that a program finds in its environment. The hash seed makes the order of sets the same in every run."""

START_SECONDS = 60.0
MAX_REPLY = 1 << 16
CONTROL_FD = 3
BOOT = (
    "import os, sys; fd = int(sys.argv[1]); fd == 3 or (os.dup2(fd, 3), os.close(fd)); sys.path[0] = sys.argv[2]; "
    "from verl.sandbox.inside.keeper import main; main()"
)


class KeeperProcess:
    """A running keeper with its watcher.

    Args:
        allow_missing: layers that may be missing, see `verl.sandbox.layers`.
        packages: whether programs may import the packages that are installed here (they can read them, never write).
        preload: modules that are imported once, so that programs get them without paying for it.
        without: layers that are not used even where they are there.
        newest_landlock: the newest version of Landlock whose features are used.
        programs: further paths that programs may read and run.
        folders: names in the root that lead into the temporary folder.

    Raises:
        SandboxRefused: this machine lacks a layer.
        SandboxError: the interpreter did not start, or a folder is not free.
    """

    def __init__(
        self,
        allow_missing: Sequence[str],
        packages: bool,
        preload: Sequence[str],
        without: Sequence[str],
        newest_landlock: int,
        programs: Sequence[str] = (),
        folders: Sequence[str] = (),
    ):
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        interpreter = _interpreter()
        self._process = subprocess.Popen(
            [interpreter, "-S", "-s", "-B", "-X", "utf8", "-c", BOOT, str(theirs.fileno()), _home_of_this_package()],
            env=ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            options = {"preload": list(preload), "without": list(without), "newest_landlock": newest_landlock}
            self._start(allow_missing, packages, {**options, "programs": list(programs), "folders": list(folders)})
        except BaseException:
            self.close()
            raise
        self._process.stderr.close()  # type: ignore[union-attr]

    def new_run(self) -> socket.socket:
        """The caller's end of a new run. Raises SandboxError where the keeper is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self._control, [b"r"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's keeper is gone: {error}") from error
        finally:
            theirs.close()
        return ours

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The watcher's."""
        return self._process.pid

    def close(self) -> None:
        """End it and everything that it started."""
        self._control.close()
        if self.owner != os.getpid():
            return
        self._process.kill()  # the keeper is killed with it, and with the keeper its pid namespace
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _start(self, allow_missing: Sequence[str], packages: bool, options: Mapping[str, Any]) -> None:
        folders = _package_folders() if packages else []
        library = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib"), "lib-dynload"))]
        paths = _with_targets([*_interpreter_paths(), *folders, *options["programs"]])
        _check_free(options["folders"], paths)
        start = {
            "caller": os.getpid(),
            "paths": paths,
            "sys_path": [*library, *folders],
            "accepted": list(allow_missing),
            **options,
        }
        self._control.settimeout(START_SECONDS)
        try:
            self._control.send(json.dumps(start).encode())
            reply = self._control.recv(MAX_REPLY)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not start within {START_SECONDS:g} s") from error
        except OSError:  # it ended and let our message lie
            reply = b""
        if not reply:
            assert self._process.stderr is not None
            self._process.kill()
            message = self._process.stderr.read()[-2000:].decode("utf-8", "replace").strip()
            raise SandboxError(f"the sandbox did not start: {message or 'it ended without a word'}")
        self._control.settimeout(None)
        answer = read_json(reply)
        self.missing, self.not_preloaded = answer["missing"], answer.get("failed", {})
        refused = refusal(self.missing, allow_missing)
        if refused is not None:
            raise refused


def _check_free(folders: Sequence[str], paths: Sequence[str]) -> None:
    """Whether the root has a place for each of the folders. Raises SandboxError where a path of the machine has it."""
    shown = [*map(root.place, root.visible(paths)), *root.DEVICES, root.PROC, root.TEMPORARY]
    for folder, path in product(folders, shown):
        if f"{path}/".startswith(f"{folder}/"):
            fix = "Name another folder, or install what is there at another place."
            raise SandboxError(f"the sandbox's folder {folder} is not free: programs see {path} there", fix=fix)


def _home_of_this_package() -> str:
    return str(Path(__file__).resolve().parents[2])


def _interpreter_paths() -> list[str]:
    """What an interpreter needs to read to run and to be started again."""
    common = ("/", "/usr", "/usr/local")  # of which the libraries are shown, and no more
    prefixes = [prefix for prefix in (sys.base_prefix, sys.base_exec_prefix) if prefix not in common]
    return [*prefixes, _interpreter(), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]


def _interpreter() -> str:
    """The interpreter outside of any virtual environment: the file itself, because programs see no links to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _with_targets(paths: Sequence[str]) -> list[str]:
    """The paths, and what they lead to where they are links."""
    return list(dict.fromkeys([*paths, *map(os.path.realpath, paths)]))


def _package_folders() -> list[str]:
    """The folders of installed packages. Not ``sys.path``: that may hold the folder of the user's own code."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]
