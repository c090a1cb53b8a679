"""Files and folders that belong to one run: a new run takes a free name, a resumed one its own."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

LOCK = ".lock"
"""In a run's folder: names the process of the run, which holds a lock on it."""
HANG = "hang.txt"
"""There, too: the stacks of a run that hung."""


def file_of_run(path: Path, resumed: bool = False, before: str | None = None, private: bool = True) -> Path:
    """``path``, or ``<stem>-2<suffix>`` and so on where other runs have a file of that name; made empty if new.

    Args:
        resumed: the run continues from a checkpoint.
        before: the name of its file so far; None where that is not known.
        private: only the user may read it, as the run's configuration; also one that an older version made.
    """
    place = _of_run(path, resumed, before, _new_private_file if private else _new_file)
    if private and resumed:
        with suppress(FileNotFoundError):
            place.chmod(0o600)
    return place


def folder_of_run(path: Path, resumed: bool = False, before: str | None = None) -> Path:
    """The same for a folder, which may be there already while it is empty."""
    return _of_run(path, resumed, before, _new_folder)


def newest_file(path: Path) -> Path | None:
    """Of the files that `file_of_run` gave to several runs, that of the run that began last; None: there is none.

    The number in the name decides: a copy of a folder may have given all of its files one time.
    """
    made = {place: _number(path, place.name) for place in path.parent.glob(f"{glob.escape(path.stem)}*")}
    return max((place for place in made if made[place]), key=made.__getitem__, default=None)


def _number(path: Path, name: str) -> int:
    """The number in a name that a run got for ``path``; 0: it is none."""
    match = re.fullmatch(rf"{re.escape(path.stem)}(?:-(\d+))?{re.escape(path.suffix)}", name)
    return 0 if match is None else int(match[1] or 1)


def private_opener(path: str, flags: int) -> int:
    """Opens a file that only the user may read, if it is new."""
    return os.open(path, flags, 0o600)


def is_locked(lock: Path) -> bool | None:
    """Whether another process holds the lock of a run, which is not taken; None: this system cannot say.

    Not for the process that holds it: closing the file would drop its lock.
    """
    if sys.platform != "linux":
        return None  # the layout of the question differs
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with lock.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:  # no such file, no permission, or a file system without locks, where a run may work, too
        return None
    return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)


def _of_run(path: Path, resumed: bool, before: str | None, take: Callable[[Path], bool]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if resumed and (before is None or _number(path, before)):
        return path.with_name(before or path.name)
    for number in count(1):
        place = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        if take(place):
            return place
    raise AssertionError("numbers do not end")


def _new_private_file(place: Path) -> bool:
    """Not where segments of another file of this name are left, which readers would take for this one's."""
    segments = place.parent.glob(f"{glob.escape(place.stem)}.[0-9][0-9][0-9][0-9]*{place.suffix}")
    return next(segments, None) is None and _new_file(place, private_opener)


def _new_file(place: Path, opener: Callable[[str, int], int] | None = None) -> bool:
    try:
        open(place, "x", opener=opener).close()
    except FileExistsError:
        return False
    return True


def _new_folder(place: Path) -> bool:
    if place.is_dir():
        return not any(place.iterdir())
    if place.exists():
        return True  # a file: the writer reports it
    try:
        place.mkdir()
    except FileExistsError:
        return False
    return True
