"""Files and folders that belong to one run: one that begins takes a free name, one that goes on its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path


def file_of_run(wanted: Path, goes_on: bool = False, before: str | None = None) -> Path:
    """``wanted``, or ``<stem>-2<suffix>`` and so on where other runs have a file of that name; made empty if new.

    Args:
        goes_on: the run goes on.
        before: the name of its file so far; None where that is not known.
    """
    return _of_run(wanted, goes_on, before, _new_file)


def folder_of_run(wanted: Path, goes_on: bool = False, before: str | None = None) -> Path:
    """The same for a folder, which may be there already while it is empty."""
    return _of_run(wanted, goes_on, before, _new_folder)


def newest_file(wanted: Path) -> Path | None:
    """Of the files that `file_of_run` gave to several runs, the one that was written to last; None: there is none."""
    made = [place for place in wanted.parent.glob(f"{wanted.stem}*{wanted.suffix}") if _numbered(wanted, place.name)]
    return max(made, key=lambda place: (place.stat().st_mtime_ns, place.name), default=None)


def set_aside(path: Path, kept: int) -> None:
    """Cut a file of JSON lines to its first ``kept`` bytes; the rest is appended to ``<stem>.replaced.jsonl``."""
    with path.open("r+b") as file:
        file.seek(kept)
        rest = file.read()
        if rest:
            with path.with_suffix(".replaced.jsonl").open("ab") as aside:
                aside.write(rest)
                os.fsync(aside.fileno())  # before the cut: a crash between the two loses nothing
            file.truncate(kept)


def _numbered(wanted: Path, name: str) -> bool:
    return re.fullmatch(rf"{re.escape(wanted.stem)}(-\d+)?{re.escape(wanted.suffix)}", name) is not None


def _of_run(wanted: Path, goes_on: bool, before: str | None, take: Callable[[Path], bool]) -> Path:
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if goes_on and (before is None or _numbered(wanted, before)):
        return wanted.with_name(before or wanted.name)
    for number in count(1):
        place = wanted if number == 1 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        if take(place):
            return place
    raise AssertionError("numbers do not end")


def _new_file(place: Path) -> bool:
    try:
        place.open("x").close()
    except FileExistsError:
        return False
    return True


def _new_folder(place: Path) -> bool:
    if place.is_dir():
        return not any(place.iterdir())
    if place.exists():
        return True  # a file: whoever writes there says so
    try:
        place.mkdir()
    except FileExistsError:
        return False
    return True
