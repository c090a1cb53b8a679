"""The list of a checkpoint's files with sizes and checksums; a folder without it is not a checkpoint.

It begins with a checksum of itself, and it is complete: a file in the folder that it does not name is no part of the
checkpoint and might be read in the place of one (weights are found by the pattern of their names).

``sequence`` counts the saves of a run folder: the newest checkpoint is the one saved last, also when a run was resumed
from an older step and saves smaller step numbers again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verl._version import __version__
from verl.checkpoint.files import FileRecord, records_of, replace_text
from verl.errors import CheckpointError
from verl.json_text import read_json

MANIFEST = "manifest.json"
FORMAT = "verl-checkpoint-2"
OLD_FORMAT = "verl-checkpoint-1"
"""The same without a checksum of itself."""
_HEAD, _BLANK = '{\n "crc32": "', "0" * 8


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint consists of.

    Args:
        step: global step.
        sequence: number of this save in its run folder.
        parts: roles that were saved.
        files: path relative to the step folder -> its record.
        pruned: roles whose files retention deleted since; such a checkpoint cannot be resumed from.
    """

    step: int
    sequence: int
    parts: tuple[str, ...]
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    pruned: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, folder: Path, step: int, sequence: int, parts: Iterable[str], written: Mapping[str, FileRecord]
    ) -> Manifest:
        """List and sync every file below ``folder``; those in ``written`` were synced and summed when written."""
        return cls(step, sequence, tuple(parts), records_of(folder, written))

    @property
    def label(self) -> str:
        """The name of this save in a run folder and its copies."""
        return f"global_step_{self.step}, save {self.sequence}"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a step folder.

        Raises:
            CheckpointError: it is absent, damaged, or of another format.
        """
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise CheckpointError(f"it has no {MANIFEST}: it was never finished", got=str(folder)) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"its {MANIFEST} is damaged", got=str(folder)) from error
        return cls.parsed(text, str(folder))

    @classmethod
    def parsed(cls, text: str, where: str) -> Manifest:
        """The manifest of a step folder from its text; raises CheckpointError, which says ``where``."""
        try:
            content = read_json(text)
            if content["format"] not in (FORMAT, OLD_FORMAT):
                raise CheckpointError(f"{where} has the format {content['format']!r}", got=where, allowed=FORMAT)
            if content["format"] == FORMAT and text != _with_checksum(text[: len(_HEAD)], text[len(_HEAD + _BLANK) :]):
                raise CheckpointError(f"the checksum of its {MANIFEST} is wrong", got=where)
            _refuse_strange(content)
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            return cls(content["step"], content["sequence"], tuple(content["parts"]), files, tuple(content["pruned"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"its {MANIFEST} is damaged", got=where) from error

    def write(self, folder: Path) -> None:
        """Write it in one step."""
        content = {"crc32": _BLANK, "format": FORMAT, "verl": __version__, **asdict(self)}
        text = json.dumps(content, indent=1) + "\n"
        replace_text(folder / MANIFEST, _with_checksum(_HEAD, text[len(_HEAD + _BLANK) :]))

    def without(self, part: str) -> Manifest:
        """The same manifest after a role was pruned."""
        files = {name: record for name, record in self.files.items() if not name.startswith(f"{part}/")}
        return replace(self, files=files, pruned=(*self.pruned, part))

    def problem(self, folder: Path, checksums: bool = True) -> str:
        """The first thing that is wrong with the files, in words; empty if all are as they were written."""
        if self.pruned:
            return f"retention has deleted its {', '.join(self.pruned)}"
        for name, record in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            size = path.stat().st_size
            if size != record.size:
                return f"{name} has {size} bytes instead of {record.size}"
            if checksums and FileRecord.of(path) != record:
                return f"the checksum of {name} is wrong"
        return ""

    def unnamed(self, folder: Path) -> list[str]:
        """Files of the folder that are no part of the checkpoint, by name; none if all is as it was written.

        Hidden files, which file systems and desktops leave (``.nfs*``, ``.DS_Store``), are read by nothing and pass.
        """
        listed = {MANIFEST, *self.files}
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
        return sorted(name for name in names if name not in listed and not name.rpartition("/")[2].startswith("."))


def _refuse_strange(content: Mapping[str, Any]) -> None:
    """Raise ValueError where a manifest, which may come from a place that others write to, leads out of its folder."""
    if not all(type(content[name]) is int for name in ("step", "sequence")):
        raise ValueError("no number")
    folders = [name for key in ("parts", "pruned") for name in content[key] if "/" in name]
    if folders or not all(is_inside(name) for key in ("parts", "pruned", "files") for name in content[key]):
        raise ValueError("a path out of its folder")


def is_inside(name: str) -> bool:
    """Whether a relative path with ``/`` stays below the folder that it is relative to."""
    return "\0" not in name and all(step not in ("", ".", "..") for step in name.split("/"))


def _with_checksum(head: str, rest: str) -> str:
    """The text of a manifest: its checksum is that of the text with zeros in the checksum's place."""
    return f"{head}{zlib.crc32(f'{head}{_BLANK}{rest}'.encode()):08x}{rest}"
