"""A folder on another machine: HDFS through its command, every other place through fsspec.

Places are URLs: ``hdfs://...``, ``s3://...`` and all that fsspec knows, ``file://...`` and plain local paths. Who may
enter is decided by the environment of the process (AWS_ACCESS_KEY_ID and the like), never by a setting of this library.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from verl.errors import DataError, MissingDependencyError
from verl.outcomes import thread_outcome
from verl.storage.fetch import first_line
from verl.storage.paths import ANSWER_SECONDS, HDFS, expand, run_hdfs

T = TypeVar("T")

ABSENT = "No such file or directory"
SLOWEST = 10_000_000
"""Bytes of a file that are copied in a second, at least: a large one may take longer than a question."""


class RemoteFolder(ABC):
    """Files below one URL; paths are relative to it, with ``/``.

    Args:
        seconds: which one request may take; a file's copy may take longer by its size.

    Raises:
        DataError: the place does not answer in this time, or refuses; every method.
        MissingDependencyError: a package or command of its kind of place is missing.
    """

    def __init__(self, url: str, seconds: float = ANSWER_SECONDS):
        self.url, self.seconds = url.rstrip("/"), seconds

    @abstractmethod
    def names(self) -> list[str]:
        """The entries directly in this folder, sorted; none if there is no such folder."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """A text file; None if there is none."""

    @abstractmethod
    def put(self, local: Path, path: str) -> None:
        """Copy a file there and replace what has its name; folders above it are made."""

    @abstractmethod
    def get(self, path: str, local: Path) -> None:
        """Copy a file here."""

    def time_for(self, size: int) -> float:
        """Seconds that the copy of a file of ``size`` bytes may take."""
        return self.seconds + size / SLOWEST

    @abstractmethod
    def sizes(self, paths: Sequence[str]) -> list[int]:
        """Bytes of files that are there."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete a file or a folder with all in it; nothing happens where there is none."""

    def put_text(self, text: str, path: str) -> None:
        """A text file there, with this content."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "text"
            file.write_text(text, encoding="utf-8")
            self.put(file, path)

    def _at(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url


def remote_folder(url: str, seconds: float = ANSWER_SECONDS) -> RemoteFolder:
    """The folder that a URL or a path names; it need not exist. One request to it may take ``seconds``.

    Raises:
        DataError: a kind of place that nobody knows.
        MissingDependencyError: the package of this kind of place is not installed.
    """
    text = expand(url)
    return HDFSFolder(text, seconds) if text.startswith(HDFS) else FsspecFolder(text, seconds)


class HDFSFolder(RemoteFolder):
    """Through ``hdfs dfs``."""

    def names(self) -> list[str]:
        if not self._exists(""):
            return []
        lines = self._run("-ls", "-C", self.url).stdout.splitlines()
        return sorted(line.rstrip("/").rpartition("/")[2] for line in lines if line.strip())

    def read(self, path: str) -> str | None:
        return self._run("-cat", self._at(path)).stdout if self._exists(path) else None

    def put(self, local: Path, path: str) -> None:
        self._run("-mkdir", "-p", self._at(path).rpartition("/")[0])
        run_hdfs("-put", "-f", str(local), self._at(path), seconds=self.time_for(local.stat().st_size))

    def get(self, path: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        seconds = self.time_for(self.sizes([path])[0])
        run_hdfs("-get", "-f", self._at(path), str(local), seconds=seconds)

    def sizes(self, paths: Sequence[str]) -> list[int]:
        if not paths:
            return []
        return [int(line) for line in self._run("-stat", "%b", *map(self._at, paths)).stdout.split()]

    def remove(self, path: str) -> None:
        self._run("-rm", "-r", "-f", "-skipTrash", self._at(path))

    def _exists(self, path: str) -> bool:
        probe = self._run("-test", "-e", self._at(path), check=False)
        # Of what is not there it says nothing; a cluster that does not answer has the same exit status.
        refused = [line for line in probe.stderr.splitlines() if line.startswith("test: ") and ABSENT not in line]
        if probe.returncode and refused:
            raise DataError(f"'hdfs dfs -test -e' failed: {refused[0][:500]}", got=self._at(path))
        return probe.returncode == 0

    def _run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run_hdfs(*arguments, check=check, seconds=self.seconds)


class FsspecFolder(RemoteFolder):
    """Through the file system that fsspec has for the URL."""

    def __init__(self, url: str, seconds: float = ANSWER_SECONDS):
        import fsspec  # about 50 ms, and few runs need it

        super().__init__(url, seconds)
        scheme = url.split("://", 1)[0] if "://" in url else "file"
        try:
            self._files, root = fsspec.core.url_to_fs(url if "://" in url else str(Path(url).absolute()))
        except ImportError as error:
            raise MissingDependencyError(
                f"the package for {scheme}:// is not installed: {first_line(error)}", got=url
            ) from error
        except ValueError as error:
            schemes = ", ".join(["hdfs", "s3", "gs", "abfs", "file"])
            raise DataError(
                f"no file system has this form of URL: {first_line(error)}", got=url, allowed=schemes
            ) from error
        self._root, self._is_local = root.rstrip("/"), scheme in ("file", "local")

    def names(self) -> list[str]:
        try:
            entries = self._ask(lambda: self._files.ls(self._root, detail=False))
        except FileNotFoundError:
            return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    def read(self, path: str) -> str | None:
        try:
            content: bytes = self._ask(lambda: self._files.cat_file(self._below(path)))
        except FileNotFoundError:
            return None
        return content.decode("utf-8", errors="replace")

    def put(self, local: Path, path: str) -> None:
        target = self._below(path)

        def copy() -> None:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(local), target)
            if self._is_local:
                shutil.copymode(local, target)  # what the user alone may read stays so

        self._must(copy, self.time_for(local.stat().st_size))

    def get(self, path: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        seconds = self.time_for(self.sizes([path])[0])
        self._must(lambda: self._files.get_file(self._below(path), str(local)), seconds)

    def sizes(self, paths: Sequence[str]) -> list[int]:
        return [int(self._must(partial(self._files.size, self._below(path)))) for path in paths]

    def remove(self, path: str) -> None:
        target = self._below(path)
        if self._ask(lambda: self._files.exists(target)):
            self._must(lambda: self._files.rm(target, recursive=True))

    def _below(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _must(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """As `_ask`, where something that is not there is an error like any other."""
        try:
            return self._ask(work, seconds)
        except FileNotFoundError as error:
            raise self._failure(error) from error

    def _ask(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """What a request answers, or its error in our words; cached listings are dropped first.

        Raises:
            FileNotFoundError: there is no such file or folder.
        """

        def ask() -> T:
            self._files.invalidate_cache()
            return work()

        # File systems hang where a disk or a network does, and nothing can end that: the thread is left behind.
        answer = thread_outcome(ask, "remote-folder", daemon=True)
        limit = self.seconds if seconds is None else seconds
        if not wait([answer], limit).done:
            raise DataError(f"the remote folder gave no answer within {limit:g} s", got=self.url)
        try:
            return answer.result()
        except FileNotFoundError:
            raise
        except ImportError as error:
            raise MissingDependencyError(f"{self.url}: {first_line(error)}") from error
        except Exception as error:  # boundary: each file system has classes of its own
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> DataError:
        return DataError(f"the remote folder does not answer as it should: {first_line(error)}", got=self.url)
