"""A checkpoint at which process after process dies is set aside, and the one before is read.

While a run reads a checkpoint, a note in its folder says which one, and how many processes in a row have begun to. The
run removes it once the checkpoint is read, or has failed with an error, which says what is wrong; a process that is
killed leaves it behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.checkpoint.files import replace_text
from verl.checkpoint.find import find_checkpoint, list_checkpoints
from verl.checkpoint.manifest import Manifest
from verl.errors import WorkerError
from verl.json_text import read_json
from verl.metrics import notice

NOTE = ".reading"
MOST_DEATHS = 3
"""Processes in a row that die at one checkpoint until it is set aside: fewer may have been killed from outside."""
ASIDE = "quarantined-"


@contextmanager
def noted_reading(root: Path, folder: Path) -> Iterator[None]:
    """Note in the run folder ``root`` that its checkpoint ``folder`` is being read; a death within leaves the note."""
    note = root / NOTE
    if folder.parent.resolve() != root.resolve():  # another run's
        yield
        return
    readers = json.dumps({"checkpoint": _name(folder), "readers": _readers(note, folder) + 1})
    try:
        replace_text(note, readers)
    except OSError as error:
        notice(f"file {note}", f"it cannot be written: {error}. A checkpoint that kills its readers is not set aside")
    is_dead = False
    try:
        yield
    except WorkerError:  # a worker's process may have died
        is_dead = True
        raise
    finally:
        if not is_dead:
            note.unlink(missing_ok=True)


def unless_deadly(root: Path, folder: Path) -> Path:
    """``folder``, the newest checkpoint of a run; the one before it, where `MOST_DEATHS` processes have died at it.

    It is renamed then, and not deleted. Where there is no other one it is read once more.
    """
    deaths = _readers(root / NOTE, folder)
    if deaths < MOST_DEATHS:
        return folder
    reason = f"the last {deaths} processes that read it died or lost a worker (out of memory? a fault of the machine?)"
    others = (c for c in list_checkpoints(root) if c.folder != folder and not c.manifest.problem(c.folder))
    if next(others, None) is None:
        notice(f"checkpoint {folder}", f"{reason}; it is read again, because there is no other one")
        return folder
    number = 1 + len(list(root.glob(f"{ASIDE}*")))
    aside = folder.rename(root / f"{ASIDE}{number}-{folder.name}")
    (root / NOTE).unlink()  # the next save of this step has nothing to do with it
    notice(f"checkpoint {folder}", f"{reason}; it is {aside.name} now, and is not used. Rename it to use it again")
    return find_checkpoint(root) or aside


def is_quarantined(root: Path, manifest: Manifest) -> bool:
    """Whether this checkpoint of the run was set aside."""
    return any(Manifest.read(folder) == manifest for folder in root.glob(f"{ASIDE}*-global_step_{manifest.step}"))


def _name(folder: Path) -> str:
    return f"{folder.name}, save {Manifest.read(folder).sequence}"


def _readers(note: Path, folder: Path) -> int:
    """Processes in a row that began to read this checkpoint and did not end that in order."""
    try:
        content = read_json(note.read_text(encoding="utf-8"))
        return int(content["readers"]) if content["checkpoint"] == _name(folder) else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        notice(f"file {note}", f"it cannot be read, and deaths are counted from 0: {error}")
        return 0
