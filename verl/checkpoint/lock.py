"""One run per folder: a lock that the operating system drops when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from verl.errors import CheckpointError
from verl.journal.places import LOCK
from verl.metrics import notice

_held: set[Path] = set()  # a POSIX lock does not exclude its own process


class RunLock:
    """An exclusive lock on a run folder, held from construction to `release`.

    The file says who holds it. It may stay behind after a crash: the lock is what the kernel knows, not the file, and
    a name that a dead run left in it, on whatever host, is reported and overwritten.

    Raises:
        CheckpointError: another live run holds it, or the file is none.

    Example:
        >>> with RunLock("checkpoints/project/experiment"): ...
    """

    def __init__(self, root: str | Path):
        self.path = Path(root).resolve() / LOCK
        self._descriptor: int | None = None
        if self.path in _held:
            raise self._refusal("this process")  # the file stays closed: closing it would drop the lock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._open()
        try:
            # The run that writes checkpoints, from before its first file to its end; the file's own lock, so that the
            # kernel drops it with the process.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder_text = _text_of(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._refusal(holder_text or "unknown") from error
            notice(f"lock {self.path}", f"this file system has no locks ({error}): nothing keeps two runs apart here")
            return
        self._descriptor = descriptor
        _held.add(self.path)
        before = _text_of(descriptor)
        if before:
            notice(f"lock {self.path}", f"its holder ended without releasing it, so it is taken over: {before}")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)

    def check(self) -> None:
        """Before something is written: where the file was removed or replaced, another run may have taken the folder.

        Raises:
            CheckpointError: one has.
        """
        if self._descriptor is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path, follow_symlinks=False)):
                return
        notice(f"lock {self.path}", "the file was removed or replaced while the run held it; it is taken again")
        self.release()
        taken = RunLock(self.path.parent)
        self._descriptor, taken._descriptor = taken._descriptor, None

    def release(self) -> None:
        """Let go; a second call does nothing."""
        if self._descriptor is not None:
            _held.discard(self.path)
            with suppress(OSError):  # a lost disk keeps the name; the kernel releases the lock anyway
                os.truncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            kind = {errno.EISDIR: "it is a folder", errno.ELOOP: "it is a link"}.get(error.errno or 0, error.strerror)
            raise CheckpointError(
                f"the lock of the run folder cannot be opened: {kind}",
                key="trainer.default_local_dir",
                got=str(self.path),
                allowed="a file",
                fix="Remove it if no run uses the folder, or choose another folder.",
            ) from error

    def _refusal(self, holder: str) -> CheckpointError:
        return CheckpointError(
            "another run writes its checkpoints into this folder",
            key="trainer.default_local_dir",
            got=str(self.path.parent),
            fix=f"Wait for it, stop it, or choose another folder. Holder: {holder}.",
        )


def is_held(root: Path) -> bool:
    """Whether this process holds the lock of a run folder."""
    return root.resolve() / LOCK in _held


def _text_of(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace")
