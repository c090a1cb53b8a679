"""What a path means: a local one, an HDFS one, a hub name; and moving bytes between the first two.

Fetching something once into a cache is in `verl.storage.fetch`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path

from verl import env
from verl.errors import DataError, MissingDependencyError, VerlError, suggest
from verl.metrics import log

HDFS = "hdfs://"
ANSWER_SECONDS = 300.0
"""How long a place may take to answer a question, unless a setting says otherwise."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def expand(path: str | Path) -> str:
    """``~`` and ``$VARIABLES`` expanded; a URL keeps its form but for the variables."""
    return env.expand(str(path))


def is_remote(path: str | Path) -> bool:
    """Whether the path names another machine (``hdfs://...``, ``s3://...``)."""
    return "://" in str(path) and not str(path).startswith("file://")


def is_hub_name(path: str | Path) -> bool:
    """Whether the path has the form ``owner/name`` and no local folder of that owner stands in its way."""
    text = str(path)
    return HUB_NAME.fullmatch(text) is not None and not Path(text).exists() and not Path(text).parent.exists()


def missing_path(path: str | Path, *, error: type[VerlError] = DataError, key: str | None = None) -> VerlError:
    """The error for a local path that does not exist: names what is near in the folder, or how far the path exists."""
    missing = Path(path)
    folder = missing.parent
    if folder.is_dir():
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        near = suggest(missing.name, names)
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        fix = near or (f"The folder {folder} has: {shown}." if names else f"The folder {folder} is empty.")
    else:
        while not folder.is_dir():
            folder = folder.parent
        fix = f"The path exists only as far as {folder.resolve()}."
    if any(sign in str(path) for sign in "*?["):
        fix = "Patterns are not expanded: name each file, as in [a.parquet,b.parquet]."
    return error("no such file or folder", key=key, got=str(path), fix=fix)


def resolve(path: str | Path, *, error: type[VerlError] = DataError, key: str | None = None) -> Path:
    """The existing local path behind what the person wrote; a missing one is an error with the near names."""
    resolved = Path(expand(str(path).removeprefix("file://")))
    if not resolved.exists():
        raise missing_path(resolved, error=error, key=key)
    return resolved


def exists(path: str | Path) -> bool:
    """Whether a local or HDFS path exists."""
    text = expand(path)
    if text.startswith(HDFS):
        return run_hdfs("-test", "-e", text, check=False, seconds=ANSWER_SECONDS).returncode == 0
    return Path(text.removeprefix("file://")).exists()


def copy(src: str | Path, dst: str | Path, **kwargs: bool) -> str:
    """Copy a file or folder between local and HDFS paths; returns the destination.

    Args:
        src: what to copy; a missing local one is a `DataError`.
        dst: where to; its parent folder is made. An existing folder takes ``src`` into itself, as ``cp`` does.
        kwargs: ``overwrite`` (default True): replace an existing file.

    Raises:
        DataError: missing source, another kind of URL, or the ``hdfs`` command failed.
        MissingDependencyError: an ``hdfs://`` path without the ``hdfs`` command.
    """
    overwrite = kwargs.pop("overwrite", True)
    if kwargs:
        raise TypeError(f"copy() has no argument {sorted(kwargs)}")
    source, target = expand(src), expand(dst)
    for text in (source, target):
        check_scheme(text)
    if source.startswith(HDFS) and target.startswith(HDFS):
        run_hdfs("-cp", *(["-f"] if overwrite else []), source, target)
    elif source.startswith(HDFS):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        run_hdfs("-get", *(["-f"] if overwrite else []), source, target)
    elif target.startswith(HDFS):
        run_hdfs("-mkdir", "-p", target.rsplit("/", 1)[0])
        run_hdfs("-put", *(["-f"] if overwrite else []), str(resolve(source)), target)
    else:
        return str(_copy_local(resolve(source), Path(target), overwrite))
    return target


def check_scheme(path: str) -> None:
    """Refuse a URL of a kind that nothing here can read."""
    if is_remote(path) and not path.startswith(HDFS):
        scheme = path.split("://", 1)[0]
        raise DataError(
            f"cannot read {scheme}:// paths",
            got=path,
            allowed="local paths, hdfs:// paths",
            fix="Copy the files to this machine first.",
        )


def run_hdfs(*arguments: str, check: bool = True, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``hdfs dfs ...``; a failure is a `DataError` that shows what the command printed.

    Args:
        seconds: after which it is ended, with an error; None: it may take as long as it needs, which the log says.
    """
    command = shutil.which("hdfs")
    if command is None:
        raise MissingDependencyError(
            "an hdfs:// path needs the command 'hdfs', which is not on PATH",
            got=arguments[-1],
            fix="Install the Hadoop client, or copy the files to this machine first.",
        )
    done = _run([command, "dfs", *arguments], f"'hdfs dfs {' '.join(arguments)}'", seconds)
    if check and done.returncode != 0:
        raise DataError(
            f"'hdfs dfs {' '.join(arguments)}' failed with code {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return done


def _run(command: list[str], shown: str, seconds: float | None) -> subprocess.CompletedProcess[str]:
    # A session of its own: the command is a script, and what it starts would hold the pipes open after its end.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        try:
            output, errors = _answer(running, shown, seconds)
            return subprocess.CompletedProcess(command, running.returncode, output, errors)
        finally:
            if running.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)


def _answer(running: subprocess.Popen[str], shown: str, seconds: float | None) -> tuple[str, str]:
    for waited in count(1):
        try:
            return running.communicate(timeout=seconds or ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            if seconds is not None:
                raise DataError(f"{shown} was ended: it gave no answer within {seconds:g} s") from None
            log.warning("%s has been running for %.0f s", shown, waited * ANSWER_SECONDS)
    raise AssertionError("counting does not end")


def _copy_local(source: Path, target: Path, overwrite: bool) -> Path:
    if target.is_dir():
        target = target / source.name
    if target.exists() and not overwrite:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)
    return target
