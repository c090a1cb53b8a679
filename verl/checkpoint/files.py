"""Files that survive a power cut: synced before they are trusted, replaced only by a rename."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError

CHUNK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size and CRC-32 of a file: enough to notice a truncation or a flipped bit, at memory speed."""

    size: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        crc = size = 0
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        return cls(size, f"{crc:08x}")


def records_of(folder: Path, written: Mapping[str, FileRecord], besides: Container[str] = ()) -> dict[str, FileRecord]:
    """Records of every file below ``folder``; those that are not in ``written`` are synced and read for their sums.

    Args:
        besides: names of files that another writer may have open, which get no record.
    """
    records: dict[str, FileRecord] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in besides:
            continue
        if name not in written:
            sync_file(path)
        records[name] = written.get(name) or FileRecord.of(path)
    return records


def write_synced(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file and wait until the disk has it; ``mode`` is that of a new one, less what the umask takes."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a text file in one step: a reader sees the old text or the new one, never a part."""
    write_synced(staging_file(path), text)
    os.replace(staging_file(path), path)
    sync_folder(path.parent)


def staging_file(path: Path) -> Path:
    """Where `replace_text` writes; a kill may leave it there."""
    return path.with_name(f".{path.name}.new")


def sync_file(path: Path) -> None:
    """Wait until the disk has what another program wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    sync_file(path)


def sync_tree_folders(root: Path) -> None:
    """Wait until the disk has the names in a folder and in all folders below it."""
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        sync_folder(folder)


def remove_tree(path: Path) -> None:
    """Delete a folder and all in it; one that is already gone is fine."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return


def checked_json_text(value: Mapping[str, Any], where: str) -> str:
    """JSON text that reads back as the same value.

    Raises:
        CheckpointError: something in it would come back changed or not at all; the message names the place.
    """
    _check_json(value, where)
    return json.dumps(value, indent=1) + "\n"


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError("a key of the state is not a string", key=where, got=key)
            _check_json(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_json(inner, f"{where}[{number}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise CheckpointError(
            "this part of the state is neither text, number, list nor mapping, so it cannot be saved as JSON",
            key=where,
            got=type(value).__name__,
        )
