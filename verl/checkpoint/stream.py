"""Large files to disk at the disk's speed, with direct writes that bypass the page cache.

Bytes are gathered in a few aligned buffers, summed there, and written past the page cache (O_DIRECT) by threads of
their own. A checkpoint is not read again soon: kept in the cache it would push out what is, and on a virtual machine
every fresh page of the cache costs several times the copy into it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
import zlib
from pathlib import Path
from types import TracebackType

from verl.checkpoint.files import FileRecord

BLOCK = 4096  # what direct writes are aligned to
PIECE = 4 << 20
WRITERS, BUFFERS = 2, 6
SMALL = 2 * PIECE
"""Files below this size go through the page cache: threads would cost more than they save."""

_spare: list[mmap.mmap] = []
_spare_lock = threading.Lock()  # streams that begin and end in several threads, while they take or return buffers


class FileStream:
    """A new file that is written once from front to end and is on the disk when its block ends.

    Args:
        size: how many bytes will come, about.

    Example:
        >>> with FileStream(path, size) as stream: stream.write(data)
        >>> stream.record

    Raises:
        OSError: from `write` or the end of the block: the disk is full, read-only, ...
    """

    def __init__(self, path: Path, size: int):
        self._crc = self._size = 0
        self._threads: list[threading.Thread] = []
        self._error: OSError | None = None
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int, int] | None] = queue.SimpleQueue()
        self._buffer: mmap.mmap | None = None
        self._used = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if size < SMALL:
            self._descriptor = os.open(path, flags, 0o644)
            return
        try:
            self._descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without direct writes
                raise
            self._descriptor = os.open(path, flags, 0o644)
        for _ in range(BUFFERS):
            self._free.put(_take_buffer())
        self._threads = [threading.Thread(target=self._drain, daemon=True) for _ in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    @property
    def record(self) -> FileRecord:
        """Size and checksum of what was written."""
        return FileRecord(self._size, f"{self._crc:08x}")

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if not self._threads:
            self._crc, self._size = zlib.crc32(view, self._crc), self._size + len(view)
            _write_all(self._descriptor, view, self._size - len(view))
            return
        while len(view):
            if self._buffer is None:
                self._buffer, self._used = self._free.get(), 0
                self._raise()
            count = min(len(view), PIECE - self._used)
            self._buffer[self._used : self._used + count] = view[:count]
            self._used, view = self._used + count, view[count:]
            if self._used == PIECE:
                self._send()

    def __enter__(self) -> FileStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._used:
                self._send()
            for _ in self._threads:
                self._full.put(None)
            for thread in self._threads:
                thread.join()
            if kind is None:
                self._raise()
                os.ftruncate(self._descriptor, self._size)  # the last block was filled up
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            _give_back([self._free.get() for _ in range(self._free.qsize())])

    def _send(self) -> None:
        """Hand the buffer to the writers, its sum taken."""
        assert self._buffer is not None, "there is nothing to send"
        with memoryview(self._buffer) as memory, memory[: self._used] as view:
            self._crc = zlib.crc32(view, self._crc)
        self._full.put((self._buffer, self._used, self._size))
        self._size += self._used
        self._buffer, self._used = None, 0

    def _drain(self) -> None:
        while (work := self._full.get()) is not None:
            buffer, count, offset = work
            try:
                if self._error is None:
                    with memoryview(buffer) as memory, memory[: -(-count // BLOCK) * BLOCK] as view:
                        _write_all(self._descriptor, view, offset)
            except OSError as error:
                self._error = error  # `write` and the end of the block raise it
            self._free.put(buffer)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    """Write at an offset; what the disk refuses to take directly goes through the cache, and so fails by name."""
    while len(view):
        try:
            count = os.pwrite(descriptor, view, offset)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & getattr(os, "O_DIRECT", 0):
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        view, offset = view[count:], offset + count


def _take_buffer() -> mmap.mmap:
    with _spare_lock:
        return _spare.pop() if _spare else mmap.mmap(-1, PIECE)


def _give_back(buffers: list[mmap.mmap]) -> None:
    """Keep buffers for the next file: their memory has been touched."""
    with _spare_lock:
        _spare.extend(buffers[: max(0, 2 * BUFFERS - len(_spare))])
