"""Weights through a folder that both sides see: the plainest transport, and the reference of the others.

A version is a folder of safetensors files, one per bucket, and a manifest with a checksum of every file that is
written last, under another name first: a reader finds a version whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from verl.errors import RolloutError
from verl.weight_sync.checksum import checksum, combine
from verl.weight_sync.chunks import WeightChunk
from verl.weight_sync.transport import Transport

MANIFEST = "weights.json"
KEPT = 2
"""Versions that stay: the newest, and the one that a slow reader may still read."""


class DiskTransport(Transport):
    """One end of a shared folder; any number of readers may read what one writer writes.

    Args:
        folder: made if it is missing; holds nothing but versions.
        version: that `receive` waits for; `send` takes the chunks' own.

    Example:
        >>> DiskTransport("/nfs/run/weights").send(chunk_weights(engine.export_weights(), 1 << 30, 3))
        >>> DiskTransport("/nfs/run/weights", version=3).receive()
    """

    def __init__(self, folder: str | Path, version: int | None = None, timeout: float = 300.0):
        super().__init__(timeout)
        self.folder, self.version = Path(folder), version

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
            # Clones, because the format refuses tensors that share memory.
            save_file({key: tensor.clone() for key, tensor in tensors.items()}, target / name)
            files.append({"file": name, "checksum": _checksum(tensors), "names": list(tensors)})
            num_bytes, last = num_bytes + chunk.num_bytes, chunk.last
            del chunk, tensors  # before the next one is made
        if target is None or not last:
            raise RolloutError("the stream of weights was interrupted")
        _write_whole(target / MANIFEST, json.dumps({"version": version, "files": files}))
        self._forget_old()
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
            if _checksum(tensors) != entry["checksum"]:
                raise RolloutError("weights on disk were damaged: the checksum differs", key=str(path))
            yield WeightChunk(version, list(tensors.items()), last=number == len(files) - 1)

    def _of(self, version: int) -> Path:
        return self.folder / f"version_{version}"

    def _fresh(self, version: int) -> Path:
        target = self._of(version)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target

    def _forget_old(self) -> None:
        found = sorted(self.folder.glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        for path in found[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)


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
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
