"""Weights through a folder that both sides see: the plainest transport, and the reference of the others.

A version is a folder with two files for each part of the weights: the bytes, and a header that comes last, under
another name first, so that a reader finds a part whole or not at all. It takes each part while the writer is at the
next one, out of the page cache and without a copy of its own. The files of a version that has no readers any more
are written over, because fresh files cost several times as much. A reader that falls behind gets an error.

Nothing is forced to the disk: after a crash of the machine the weights come from a checkpoint.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl.errors import RolloutError
from verl.outcomes import on_error
from verl.protocol.codec import tensor_bytes
from verl.weight_sync.checksum import checksum, combine
from verl.weight_sync.chunks import WeightChunk, pieces
from verl.weight_sync.transport import PeerFailedError, Transport
from verl.weight_sync.wire import ChunkLayout, chunk_of

BYTES, HEADER = ".bin", ".json"
PIECE_BYTES = 8 << 20
"""A part is so large, or one larger tensor."""
KEPT = 2
"""Versions that stay: the newest, and the one that a slow reader may still read."""


class DiskTransport(Transport):
    """One end of a shared folder; any number of readers may read what one writer writes.

    Args:
        folder: made if it is missing; holds nothing but versions.
        version: that `receive` waits for; `send` takes the chunks' own.
        checksums: write a checksum of every part, which readers then compare. Files that are too short are found in
            any case.
        writer: whose weights `receive` takes (`address`), so that it never takes those that an earlier run left in the
            folder; null: anybody's.

    Example:
        >>> DiskTransport("/nfs/run/weights").send(chunk_weights(engine.export_weights(), 1 << 30, 3))
        >>> DiskTransport("/nfs/run/weights", version=3).receive()
    """

    not_options: ClassVar[tuple[str, ...]] = ("version", "writer")

    def __init__(
        self,
        folder: str | Path,
        version: int | None = None,
        timeout: float = 300.0,
        checksums: bool = False,
        writer: str | None = None,
    ):
        super().__init__(timeout)
        self.folder, self.version, self.checksums, self.writer = Path(folder), version, checksums, writer
        self._name, self._streams, self._is_owner = secrets.token_hex(8), 0, False

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cpu", **options: Any) -> DiskTransport:
        """In ``folder``, else in a folder of its own that `close` removes."""
        is_owner = "folder" not in options
        end = cls(options.pop("folder", None) or tempfile.mkdtemp(prefix="verl-weights-"), **options)
        end._is_owner = is_owner
        return end

    @property
    def address(self) -> dict[str, Any]:
        return {"folder": str(self.folder.absolute()), "timeout": self.timeout, "writer": self._name}

    def expect(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        if self._is_owner:
            shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        target: Path | None = None
        self._streams += 1
        version = number = num_bytes = 0
        last = False

        def give_up(_: BaseException) -> None:
            if target is not None:
                with suppress(OSError):
                    self._publish(_part(target, number), ChunkLayout(version, False, []), gave_up=True)

        with on_error(give_up):
            for chunk in chunks:
                version, last = chunk.version, chunk.last
                with self._writing():
                    target = target or self._fresh(version)
                for piece in pieces(chunk, PIECE_BYTES):
                    with self._writing():
                        self._write(_part(target, number), piece)
                    number += 1
                num_bytes += chunk.num_bytes
                del chunk, piece  # before the next one is made
            if target is None or not last:
                raise RolloutError("the stream of weights was interrupted")
        for stale in target.glob(f"*{BYTES}"):
            if int(stale.stem) >= number:
                stale.unlink()
        return num_bytes

    def receive(self) -> Iterator[WeightChunk]:
        if self.version is None:
            raise RolloutError("which version of the weights?", key="version")
        version, stream, number, ended = self.version, "", 0, False
        while not ended:
            path = _part(self._of(version), number)
            header = path.with_suffix(HEADER)
            text, layout, more = self._await(header, version)
            if more.get("gave_up"):
                raise PeerFailedError("the trainer gave up in the middle of a transfer of weights")
            stream = stream or str(more.get("stream"))
            if layout.version != version or more.get("stream") != stream:
                raise RolloutError("other weights lie there", key=str(header), got=layout.version, allowed=str(version))
            chunk = chunk_of(layout, _mapped(path.with_suffix(BYTES), layout.num_bytes))
            if "checksum" in more and _checksum(chunk) != more["checksum"]:
                raise RolloutError("weights on disk were damaged: the checksum differs", key=str(path))
            yield chunk
            del chunk
            if _text(header) != text:
                raise RolloutError(
                    f"version {version} of the weights was replaced while it was read",
                    key=str(path),
                    fix=f"The trainer keeps {KEPT} versions: take each one before the second next is written.",
                )
            number, ended = number + 1, layout.last

    @property
    def _signed(self) -> dict[str, str]:
        """What every header of a stream carries, and those of no other stream."""
        return {"writer": self._name, "stream": f"{self._name}-{self._streams}"}

    def _await(self, header: Path, version: int) -> tuple[bytes, ChunkLayout, dict[str, Any]]:
        """The header of the expected writer, once it is there: its text, and what it says."""
        arrived: list[tuple[bytes, ChunkLayout, dict[str, Any]]] = []

        def is_there() -> bool:
            text = _text(header)
            if text:
                layout, more = ChunkLayout.decode(text)
                if self.writer in (None, more.get("writer")):
                    arrived.append((text, layout, more))
            return bool(arrived)

        self.wait_until(is_there, f"version {version} of the weights in {self.folder}")
        return arrived[0]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say where there is no room or no right to write."""
        try:
            yield
        except OSError as error:
            raise RolloutError(
                f"the folder for weights cannot be written: {error.strerror}",
                key="actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.folder",
                got=str(self.folder),
                fix="Name a folder that can be written, has room for several versions and is seen by the sampler.",
            ) from error

    def _write(self, path: Path, piece: WeightChunk) -> None:
        layout = ChunkLayout.of(piece)
        with _opened(path.with_suffix(BYTES), os.O_WRONLY | os.O_CREAT) as handle:
            # A file never becomes shorter: a slow reader that has mapped it would be killed instead of hearing of it.
            if os.fstat(handle).st_size < layout.num_bytes:
                os.ftruncate(handle, layout.num_bytes)
            for place, (_, tensor) in zip(layout.entries, piece.tensors):
                _write_at(handle, place.offset, tensor_bytes(tensor).data)
        self._publish(path, layout, **({"checksum": _checksum(piece)} if self.checksums else {}))

    def _publish(self, path: Path, layout: ChunkLayout, **more: Any) -> None:
        """Write the header of a part, which appears as a whole."""
        draft = path.with_suffix(".part")
        with _opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
            _write_at(handle, 0, memoryview(layout.encode(**self._signed, **more)))
        draft.rename(path.with_suffix(HEADER))

    def _of(self, version: int) -> Path:
        return self.folder / f"version_{version}"

    def _fresh(self, version: int) -> Path:
        """The folder of a new version: that of an old one, with its bytes but without its headers."""
        target = self._of(version)
        _forget(target)
        old = [path for path in self._versions() if path != target]
        for path in old[: max(0, len(old) - KEPT)]:
            shutil.rmtree(path, ignore_errors=True)
        if len(old) >= KEPT and not target.exists():
            _forget(old[-KEPT])
            old[-KEPT].rename(target)
        target.mkdir(parents=True, exist_ok=True)
        return target

    def _versions(self) -> list[Path]:
        """Folders of versions, the oldest first."""
        return sorted(self.folder.glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def _part(folder: Path, number: int) -> Path:
    """The path of the two files of a part, without their endings."""
    return folder / f"{number:05d}"


def _forget(folder: Path) -> None:
    """Make a version one that is not there, before its bytes are written over."""
    for header in folder.glob(f"*{HEADER}"):
        header.unlink()


def _text(header: Path) -> bytes:
    """What a header says; nothing, if it is not there."""
    try:
        with _opened(header, os.O_RDONLY) as handle:
            return os.read(handle, os.fstat(handle).st_size)  # whole: it was renamed when it was complete
    except FileNotFoundError:
        return b""


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A file of this user's alone, by its handle; a link is an error."""
    handle = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _write_at(handle: int, place: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(handle, data, place)
        data, place = data[written:], place + written


def _mapped(path: Path, num_bytes: int) -> torch.Tensor:
    """The first bytes of a file, where the page cache has them. What is written into them does not reach the file."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        with _opened(path, os.O_RDONLY) as handle:
            memory = mmap.mmap(handle, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:  # the last two: the file is shorter than its header says
        raise RolloutError(f"weights on disk cannot be read: {error}", key=str(path)) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _checksum(chunk: WeightChunk) -> int:
    return combine([checksum(tensor) for _, tensor in chunk.tensors])
