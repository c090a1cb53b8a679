"""A checkpoint at which process after process dies is passed over once, and the one before it is read.

While the run that holds the lock of its folder reads a checkpoint, a note in the folder says which one, and how many
processes in a row have begun to and vanished. An error, or a signal that ends the run in order, is no death. Nothing is
renamed or deleted. Where the one before kills its readers too, the machine is at fault, and the run ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verl.checkpoint.files import replace_text
from verl.checkpoint.lock import is_held
from verl.checkpoint.manifest import Manifest
from verl.errors import CheckpointError
from verl.json_text import read_json
from verl.metrics import notice

NOTE = ".reading"
MOST_DEATHS = 3
"""Processes in a row that vanish at one checkpoint until it is passed over: fewer may have been killed from outside."""
_open: dict[Path, ReadingNote] = {}
"""Notes of checkpoints that this process reads, as they were before."""


@dataclass(frozen=True)
class ReadingNote:
    """What ``<root>/.reading`` says; checkpoints are named by `Manifest.label`.

    Args:
        skipped: checkpoints that are passed over.
        reading: the one that is being read, or whose readers died.
        readers: processes in a row that began to read it and did not end that in order.
        is_fallback: one was passed over, and none was read since.
    """

    skipped: tuple[str, ...] = ()
    reading: str = ""
    readers: int = 0
    is_fallback: bool = False

    @classmethod
    def read(cls, root: Path) -> ReadingNote:
        """That of a run folder; a damaged one says nothing, with a notice."""
        try:
            content = read_json((root / NOTE).read_text(encoding="utf-8"))
            return cls(**content | {"skipped": tuple(content["skipped"]), "readers": int(content["readers"])})
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            notice(f"file {root / NOTE}", f"it cannot be read, and deaths are counted from 0: {error}")
            return cls()

    def write(self, file: Path) -> None:
        try:
            if self == ReadingNote():
                file.unlink(missing_ok=True)
            else:
                replace_text(file, json.dumps(asdict(self)))
        except OSError as error:  # the error of the run itself, if there is one, says more
            notice(f"file {file}", f"it cannot be written: {error}. Deaths at a checkpoint are not counted")


@contextmanager
def noted_reading(root: Path, folder: Path) -> Iterator[None]:
    """Note in the run folder ``root``, whose lock this process holds, that its checkpoint ``folder`` is being read."""
    if folder.parent.resolve() != root.resolve() or not is_held(root):  # another run's, or one that only looks
        yield
        return
    file, note, label = root / NOTE, ReadingNote.read(root), Manifest.read(folder).label
    begun = note if note.reading == label else replace(note, reading=label, readers=0)
    after = replace(note, reading="", readers=0)
    _open[file] = begun
    replace(begun, readers=begun.readers + 1).write(file)
    try:
        yield
        after = ReadingNote(tuple(name for name in note.skipped if name != label))
    finally:
        del _open[file]
        after.write(file)


def forget_reading() -> None:
    """The process ends because of a signal, and not at the checkpoint that it reads."""
    for file, begun in list(_open.items()):
        begun.write(file)


def skipped_checkpoints(root: Path) -> tuple[str, ...]:
    """Labels of the checkpoints that a run passes over, the last one because `MOST_DEATHS` processes have died at it.

    Raises:
        CheckpointError: processes die at the one that is read instead, too. The next start reads the newest one again.
    """
    note = ReadingNote.read(root)
    if note.readers < MOST_DEATHS or note.reading in note.skipped or not is_held(root):
        return note.skipped
    if note.is_fallback:
        ReadingNote(note.skipped[:-1]).write(root / NOTE)
        raise CheckpointError(
            f"process after process dies while it reads a checkpoint, {note.skipped[-1]} or {note.reading}: the "
            "machine or its limits are at fault, not the checkpoints",
            got=str(root),
            fix="Give the run more memory (the kernel's log says what was killed), and start it again.",
        )
    return *note.skipped, note.reading


def pass_over(root: Path, labels: tuple[str, ...]) -> None:
    """Keep that these checkpoints are passed over, now that another one can be read."""
    note = ReadingNote.read(root)
    if is_held(root) and labels != note.skipped:
        reason = f"the last {note.readers} processes that read it died (out of memory? a fault of the machine?)"
        notice(f"checkpoint {labels[-1]}", f"{reason}; the one before is read")
        ReadingNote(labels, is_fallback=True).write(root / NOTE)
