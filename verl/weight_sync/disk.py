"""Weights through a folder that both sides see: the plainest transport, and the reference of the others.

A version is a folder of safetensors files, one per bucket, and a manifest that is written last, under another name
first: a reader finds a version whole or not at all. The files of a version that nobody should read any more are written
over, because fresh files cost several times as much as reused ones. Whoever reads too slowly hears of it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from verl.errors import RolloutError
from verl.weight_sync.checksum import checksum, combine
from verl.weight_sync.chunks import WeightChunk
from verl.weight_sync.transport import Transport

MANIFEST = "weights.json"
ALIGNMENT = 64
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""How safetensors calls the dtypes."""
KEPT = 2
"""Versions that stay: the newest, and the one that a slow reader may still read."""


class DiskTransport(Transport):
    """One end of a shared folder; any number of readers may read what one writer writes.

    Args:
        folder: made if it is missing; holds nothing but versions.
        version: that `receive` waits for; `send` takes the chunks' own.
        checksums: write a checksum of every file, which readers then compare. Files that are too short are found in
            any case.

    Example:
        >>> DiskTransport("/nfs/run/weights").send(chunk_weights(engine.export_weights(), 1 << 30, 3))
        >>> DiskTransport("/nfs/run/weights", version=3).receive()
    """

    not_options: ClassVar[tuple[str, ...]] = ("version",)

    def __init__(self, folder: str | Path, version: int | None = None, timeout: float = 300.0, checksums: bool = False):
        super().__init__(timeout)
        self.folder, self.version, self.checksums = Path(folder), version, checksums
        self._is_owner = False

    @classmethod
    def begin(cls, bucket_bytes: int, device: str = "cpu", **options: Any) -> DiskTransport:
        """In ``folder``, else in a folder of its own that `close` removes."""
        made = "folder" not in options
        end = cls(options.pop("folder", None) or tempfile.mkdtemp(prefix="verl-weights-"), **options)
        end._is_owner = made
        return end

    @property
    def address(self) -> dict[str, Any]:
        return {"folder": str(self.folder.absolute()), "timeout": self.timeout}

    def expect(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        if self._is_owner:
            shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, chunks: Iterable[WeightChunk]) -> int:
        target: Path | None = None
        files: list[dict[str, object]] = []
        num_bytes, last = 0, False
        for chunk in chunks:
            if target is None:
                target = self._fresh(chunk.version)
                version = chunk.version
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in chunk.tensors}
            name = f"{len(files):05d}.safetensors"
            write_file(target / name, tensors)
            entry: dict[str, object] = {"file": name, "names": list(tensors)}
            files.append({**entry, "checksum": _checksum(tensors)} if self.checksums else entry)
            num_bytes, last = num_bytes + chunk.num_bytes, chunk.last
            del chunk, tensors  # before the next one is made
        if target is None or not last:
            raise RolloutError("the stream of weights was interrupted")
        for stale in set(target.glob("*.safetensors")) - {target / str(entry["file"]) for entry in files}:
            stale.unlink()
        _write_whole(target / MANIFEST, json.dumps({"version": version, "files": files}))
        return num_bytes

    def receive(self) -> Iterator[WeightChunk]:
        version = self.version
        if version is None:
            raise RolloutError("which version of the weights?", key="version")
        folder = self._of(version)
        self.wait_until((folder / MANIFEST).is_file, f"version {version} of the weights in {self.folder}")
        files = _read_manifest(folder / MANIFEST, version)
        for number, entry in enumerate(files):
            path = folder / Path(str(entry["file"])).name
            try:
                found = load_file(path)
                tensors = {str(name): found[str(name)] for name in entry["names"]}
            except (OSError, SafetensorError, KeyError) as error:
                raise RolloutError(f"weights on disk cannot be read: {error}", key=str(path)) from error
            if "checksum" in entry and _checksum(tensors) != entry["checksum"]:
                raise RolloutError("weights on disk were damaged: the checksum differs", key=str(path))
            yield WeightChunk(version, list(tensors.items()), last=number == len(files) - 1)
            if not (folder / MANIFEST).is_file():
                raise RolloutError(
                    f"version {version} of the weights was replaced while it was read",
                    key=str(path),
                    fix=f"The trainer keeps {KEPT} versions: take each one before the second next is written.",
                )

    def _of(self, version: int) -> Path:
        return self.folder / f"version_{version}"

    def _fresh(self, version: int) -> Path:
        """The folder of a new version: that of an old one, with its files but without its manifest."""
        target = self._of(version)
        (target / MANIFEST).unlink(missing_ok=True)
        old = [path for path in self._versions() if path != target]
        for path in old[: max(0, len(old) - KEPT)]:
            shutil.rmtree(path, ignore_errors=True)
        if len(old) >= KEPT and not target.exists():
            reused = old[-KEPT]
            (reused / MANIFEST).unlink(missing_ok=True)
            reused.rename(target)
        target.mkdir(parents=True, exist_ok=True)
        return target

    def _versions(self) -> list[Path]:
        """Folders of versions, the oldest first."""
        return sorted(self.folder.glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file, over the one that is there; the bytes go from the tensors to the file without a detour.

    Args:
        tensors: contiguous, on the host.
    """
    header: dict[str, Any] = {}
    place = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise RolloutError("weights of this dtype cannot be written", key=name, got=str(tensor.dtype))
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            whole: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
            left = memoryview(whole)
            while left:
                left = left[file.write(left) :]
        file.truncate()


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    return combine([checksum(tensor) for tensor in tensors.values()])


def _read_manifest(path: Path, version: int) -> list[dict]:
    try:
        found = json.loads(path.read_text())
        files, written = list(found["files"]), int(found["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"the manifest of weights on disk cannot be read: {error}", key=str(path)) from error
    if written != version:
        raise RolloutError("another version lies there", key=str(path), got=written, allowed=str(version))
    return files


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".part")
    with draft.open("w") as file:
        file.write(text)
    draft.replace(path)
