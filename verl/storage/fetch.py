"""Bring what a path names to this machine once: HDFS files, hub models, and copies in shared memory.

A fetched thing appears under its final name only when it is complete, and processes that fetch the same thing wait for
the first one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from verl import env
from verl.errors import DataError, MissingDependencyError, ModelError, VerlError
from verl.metrics import log, notice
from verl.storage.paths import HDFS, check_scheme, expand, is_hub_name, missing_path, run_hdfs

CACHE = "~/.cache/verl"
SHARED_MEMORY = Path("/dev/shm")
UNUSED_WEIGHTS = ["original/*", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot"]


def copy_to_local(
    src: str | Path,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
    *,
    error: type[VerlError] = DataError,
    key: str | None = None,
) -> str:
    """The local path of what ``src`` names: a local path as it is, an ``hdfs://`` path or a hub model fetched.

    Args:
        src: local path (``~`` and variables are expanded), ``hdfs://`` path, or a hub name ``owner/name``; with
            VERL_USE_MODELSCOPE set, hub names are looked up at ModelScope.
        cache_dir: where HDFS files land, default ``~/.cache/verl``; hub models land in the hub's own cache.
        filelock: suffix of the lock file next to a fetched thing.
        always_recopy: fetch again even if it is there.
        use_shm: return a copy in a folder of this user's alone in ``/dev/shm``; without room there, a notice and the
            path itself.
        error: the class of the error for a path that does not exist.
        key: the setting that the path came from, for the message.
    """
    path = expand(str(src).removeprefix("file://"))
    check_scheme(path)
    if path.startswith(HDFS):
        path = _fetch_hdfs(path, Path(expand(cache_dir or CACHE)), filelock, always_recopy, verbose)
    elif not Path(path).exists():
        if not is_hub_name(path):
            raise missing_path(path, error=error, key=key)
        path = download_from_hub(path)
    if not use_shm:
        return path
    try:
        return str(_stage_in_memory(Path(path), filelock, always_recopy))
    except NotPrivateError as refused:
        raise error(
            f"use_shm: {refused}",
            key=key,
            fix=f"Remove it, or ask an administrator to: rm -rf {refused.folder}. Or set use_shm=false.",
        ) from None


class NotPrivateError(Exception):
    """A folder under this user's name belongs to somebody else, or others may enter it."""

    def __init__(self, folder: Path):
        super().__init__(f"{folder} is not a folder of this user's alone (mode 0700): what it holds cannot be trusted")
        self.folder = folder


def make_private_folder(place: Path) -> Path:
    """A folder of this user's alone where everybody may make one; its owner and mode are checked.

    Args:
        place: its parent folder; the user's number becomes part of its name.

    Raises:
        NotPrivateError: the name is taken by a link, a file, another user, or a folder that others may enter.
    """
    folder = place / f"verl-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or stat.S_IMODE(there.st_mode) & 0o077:
        raise NotPrivateError(folder)
    return folder


def download_from_hub(name: str) -> str:
    """The local folder of a hub model, downloaded if it is not in the hub's cache; a failure is a `ModelError`."""
    hub = "ModelScope" if env.get_flag("VERL_USE_MODELSCOPE") else "Hugging Face"
    download = _modelscope_download() if hub == "ModelScope" else _hugging_face_download()
    try:
        return str(download(name))
    except (OSError, ValueError) as failure:
        raise ModelError(
            f"not a local folder, and {hub} gave no model of that name: {first_line(failure)}",
            got=name,
            fix="Check the name and the network, or set the path to a folder on this machine.",
        ) from failure


def _hugging_face_download() -> Callable[[str], str]:
    from huggingface_hub import snapshot_download

    return lambda name: snapshot_download(name, ignore_patterns=UNUSED_WEIGHTS)


def _modelscope_download() -> Callable[[str], str]:
    try:
        from modelscope import snapshot_download
    except ImportError as failure:
        raise MissingDependencyError(
            "VERL_USE_MODELSCOPE is set, but the package is not installed", fix="pip install modelscope"
        ) from failure
    return snapshot_download


def first_line(failure: BaseException) -> str:
    """An error as one line: its class and the first line of its text."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"


def _fetch_hdfs(path: str, cache: Path, lock_suffix: str, again: bool, verbose: bool) -> str:
    target = cache / _digest(path) / path.rstrip("/").rsplit("/", 1)[-1]

    def fetch(partial: Path) -> None:
        if verbose:
            log.info("copying %s to %s", path, target)
        run_hdfs("-get", path, str(partial))

    _once(target, lock_suffix, again, fetch)
    return str(target)


def _stage_in_memory(path: Path, lock_suffix: str, again: bool) -> Path:
    if not SHARED_MEMORY.is_dir():
        notice("use_shm", f"this machine has no {SHARED_MEMORY}; {path} is read from where it is")
        return path
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    need = sum(p.stat().st_size for p in files)
    newest = max((p.stat().st_mtime_ns for p in files), default=0)
    target = make_private_folder(SHARED_MEMORY) / _digest(f"{path.resolve()}:{need}:{newest}") / path.name
    free = shutil.disk_usage(SHARED_MEMORY).free
    if not target.exists() and need > free:
        notice(
            "use_shm", f"{path} needs {need / 1e9:.2f} GB and {SHARED_MEMORY} has {free / 1e9:.2f}; not copied there"
        )
        return path

    def fill(partial: Path) -> Path | str:
        return shutil.copytree(path, partial) if path.is_dir() else shutil.copy2(path, partial)

    _once(target, lock_suffix, again, fill)
    return target


def _once(target: Path, lock_suffix: str, again: bool, make: Callable[[Path], Any]) -> None:
    """Make ``target`` under a partial name and rename it when it is whole; others wait at the lock."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f"{target.name}{lock_suffix}"):
        if target.exists() and not again:
            return
        partial = target.with_name(target.name + ".partial")
        _remove(partial)
        make(partial)
        _remove(target)
        partial.rename(target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
