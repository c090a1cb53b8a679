"""A folder on another machine: HDFS through its command, every other place through fsspec.

Places are URLs: ``hdfs://...``, ``s3://...`` and all that fsspec knows, ``file://...`` and plain local paths. Who may
enter is decided by the environment of the process (AWS_ACCESS_KEY_ID and the like), never by a setting of this library.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.errors import DataError, MissingDependencyError
from verl.storage.fetch import first_line
from verl.storage.paths import HDFS, expand, run_hdfs

ABSENT = "No such file or directory"


class RemoteFolder(ABC):
    """Files below one URL; paths are relative to it, with ``/``.

    Raises:
        DataError: the place does not answer, or refuses; every method.
        MissingDependencyError: a package or command of its kind of place is missing.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")

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


def remote_folder(url: str) -> RemoteFolder:
    """The folder that a URL or a path names; it need not exist.

    Raises:
        DataError: a kind of place that nobody knows.
        MissingDependencyError: the package of this kind of place is not installed.
    """
    text = expand(url)
    return HDFSFolder(text) if text.startswith(HDFS) else FsspecFolder(text)


class HDFSFolder(RemoteFolder):
    """Through ``hdfs dfs``."""

    def names(self) -> list[str]:
        if not self._exists(""):
            return []
        lines = run_hdfs("-ls", "-C", self.url).stdout.splitlines()
        return sorted(line.rstrip("/").rpartition("/")[2] for line in lines if line.strip())

    def read(self, path: str) -> str | None:
        return run_hdfs("-cat", self._at(path)).stdout if self._exists(path) else None

    def put(self, local: Path, path: str) -> None:
        run_hdfs("-mkdir", "-p", self._at(path).rpartition("/")[0])
        run_hdfs("-put", "-f", str(local), self._at(path))

    def get(self, path: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        run_hdfs("-get", "-f", self._at(path), str(local))

    def sizes(self, paths: Sequence[str]) -> list[int]:
        if not paths:
            return []
        return [int(line) for line in run_hdfs("-stat", "%b", *map(self._at, paths)).stdout.split()]

    def remove(self, path: str) -> None:
        run_hdfs("-rm", "-r", "-f", "-skipTrash", self._at(path))

    def _exists(self, path: str) -> bool:
        asked = run_hdfs("-test", "-e", self._at(path), check=False)
        # Of what is not there it says nothing; a cluster that does not answer has the same exit status.
        refused = [line for line in asked.stderr.splitlines() if line.startswith("test: ") and ABSENT not in line]
        if asked.returncode and refused:
            raise DataError(f"'hdfs dfs -test -e' failed: {refused[0][:500]}", got=self._at(path))
        return asked.returncode == 0


class FsspecFolder(RemoteFolder):
    """Through the file system that fsspec has for the URL."""

    def __init__(self, url: str):
        import fsspec  # about 50 ms, and few runs need it

        super().__init__(url)
        scheme = url.split("://", 1)[0] if "://" in url else "file"
        try:
            self._files, root = fsspec.core.url_to_fs(url if "://" in url else str(Path(url).absolute()))
        except ImportError as error:
            raise MissingDependencyError(
                f"the package for {scheme}:// is not installed: {first_line(error)}", got=url
            ) from error
        except ValueError as error:
            known = ", ".join(["hdfs", "s3", "gs", "abfs", "file"])
            raise DataError(
                f"no file system has this form of URL: {first_line(error)}", got=url, allowed=known
            ) from error
        self._root, self._is_local = root.rstrip("/"), scheme in ("file", "local")

    def names(self) -> list[str]:
        with self._explained():
            try:
                entries = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)

    def read(self, path: str) -> str | None:
        with self._explained():
            try:
                content: bytes = self._files.cat_file(self._below(path))
            except FileNotFoundError:
                return None
        return content.decode("utf-8", errors="replace")

    def put(self, local: Path, path: str) -> None:
        target = self._below(path)
        with self._explained():
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(local), target)
            if self._is_local:
                shutil.copymode(local, target)  # what the user alone may read stays so

    def get(self, path: str, local: Path) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            self._files.get_file(self._below(path), str(local))

    def sizes(self, paths: Sequence[str]) -> list[int]:
        with self._explained():
            return [int(self._files.size(self._below(path))) for path in paths]

    def remove(self, path: str) -> None:
        with self._explained():
            if self._files.exists(self._below(path)):
                self._files.rm(self._below(path), recursive=True)

    def _below(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextmanager
    def _explained(self) -> Iterator[Any]:
        """Errors of the file system in our words; what was listed before is listed anew."""
        self._files.invalidate_cache()
        try:
            yield
        except ImportError as error:
            raise MissingDependencyError(f"{self.url}: {first_line(error)}") from error
        except Exception as error:  # boundary: each file system has classes of its own
            raise DataError(
                f"the remote folder does not answer as it should: {first_line(error)}", got=self.url
            ) from error
