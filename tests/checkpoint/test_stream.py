"""Large files go past the page cache in pieces; what arrives is what was sent, and what fails is said."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

import pytest

from tests.harness.programs import python
from verl.checkpoint import stream as module
from verl.checkpoint.files import FileRecord
from verl.checkpoint.stream import PIECE, FileStream

ROOT = Path(__file__).resolve().parents[2]


def pieces(sizes: list[int]) -> list[bytes]:
    return [bytes([i % 251 for i in range(7)]) * (size // 7 + 1) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [[0], [5], [PIECE, 3], [2 * PIECE], [2 * PIECE + 1], [3, PIECE - 1, 4096, 2 * PIECE, 17], [700_001] * 40],
)
def test_what_is_written_is_what_was_sent_and_the_record_says_so(tmp_path, sizes):
    data = [piece[:size] for piece, size in zip(pieces(sizes), sizes)]
    with FileStream(tmp_path / "file", sum(sizes)) as stream:
        for piece in data:
            stream.write(piece)
    whole = b"".join(data)
    assert (tmp_path / "file").read_bytes() == whole
    assert stream.record == FileRecord(len(whole), f"{zlib.crc32(whole):08x}") == FileRecord.of(tmp_path / "file")


def test_a_file_system_without_direct_writes_gets_the_file_through_the_cache(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(module.os, "open", refuse)
    data = os.urandom(1000) * 9000
    with FileStream(tmp_path / "file", len(data)) as stream:
        stream.write(data)
    assert (tmp_path / "file").read_bytes() == data


def test_an_error_of_a_writing_thread_is_raised_to_the_caller(tmp_path, monkeypatch):
    def full(descriptor, view, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"), FileStream(tmp_path / "file", 20 * PIECE) as stream:
        for _ in range(20):
            stream.write(bytes(PIECE))


def test_an_interrupted_write_ends_its_threads_and_closes_the_file(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), FileStream(tmp_path / "file", 3 * PIECE) as stream:
        stream.write(bytes(2 * PIECE))
        raise KeyboardInterrupt
    assert not any(thread.is_alive() for thread in stream._threads)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_limit_on_the_size_of_files_is_named_as_such(tmp_path):
    """Direct writes at an odd limit fail with 'invalid argument'; the person must read 'file too large'."""
    code = (
        "import sys, resource; from pathlib import Path\n"
        "from verl.checkpoint.stream import FileStream, PIECE\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({PIECE + 1000}, {PIECE + 1000}))\n"
        "with FileStream(Path(sys.argv[1]), 4 * PIECE) as stream:\n    stream.write(bytes(4 * PIECE))\n"
    )
    done = python("-c", code, str(tmp_path / "file"), check=False)
    assert "File too large" in done.stderr.splitlines()[-1]


def test_buffers_are_kept_for_the_next_file_but_not_without_end(tmp_path):
    for number in range(3):
        with FileStream(tmp_path / str(number), 3 * PIECE) as stream:
            stream.write(bytes(3 * PIECE))
    assert 0 < len(module._spare) <= 2 * module.BUFFERS
