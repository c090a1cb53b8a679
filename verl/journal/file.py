"""The journal of a run: one file, one JSON line per event, appended before anything counts on the event.

A line is in the file, whatever happens to the process, as soon as its call returns, and no line is ever changed. Each
process of the run begins with an entry ``run``, which says after how many entries of the file it continues
(``after``): those that the checkpoint knows. What the process before it wrote later no longer holds, since its steps
are repeated. `entries_in` follows these entries back from the last one, and gives the history of a run that nothing
interrupted. Every line ends with the CRC-32 of its text.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from verl.errors import DataError
from verl.journal.places import file_of_run, newest_file, private_opener
from verl.json_text import read_json
from verl.metrics import notice

Entry = Mapping[str, Any]
"""One line of a journal."""
RUN, NAME, FORMAT = "run", "journal.jsonl", 2
POSITION = "journal.json"
"""In a checkpoint."""
KEY = "trainer.default_local_dir"
EARLIER = {"samples": "ledger.jsonl", "decisions": "schedule.jsonl"}
"""Files of releases that had one per kind of event; these two are still read."""
CHECK, END, RUN_LINE = b',"crc":"', b'"}\n', b'{"event":"run"'
ENDLESS = 1 << 62
IDLE = frozenset((RUN, "weights", "span"))
"""Events of a process that has begun no step."""


class DamagedJournal(DataError):
    """A line that holds is no entry, or follows from none before it."""


@dataclass(frozen=True)
class Position:
    """A place in a journal, which a checkpoint remembers.

    Args:
        entries: number of entries before it.
        check: the checksum of the last one of these, which tells the journals of two runs from each other.
        decisions: of the recorded schedule (`verl.journal.schedule`) among them.
    """

    entries: int
    check: str
    decisions: int = 0

    @classmethod
    def read(cls, checkpoint: Path) -> Position | None:
        """What a checkpoint keeps; None where it keeps none.

        Raises:
            DataError: its file is damaged.
        """
        try:
            kept = read_json((checkpoint / POSITION).read_bytes())
            return cls(int(kept["entries"]), str(kept["check"]), int(kept["decisions"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError("the checkpoint's place in the journal cannot be read", got=str(checkpoint / POSITION),
                            fix="Continue from another checkpoint (trainer.resume_from_path).") from error  # fmt: skip

    def files(self) -> dict[str, str]:
        """Name -> text of what a checkpoint keeps."""
        return {POSITION: json.dumps(asdict(self)) + "\n"}


class Writer(Protocol):
    """Writes one kind of event, and takes in what the checkpoint knows before it does."""

    def take_in(self, entry: Entry) -> None:
        """An entry that holds, of any kind; raises KeyError, TypeError, ValueError or IndexError where it is wrong."""

    def start_over(self) -> None:
        """Forget what was taken in."""


class Journal:
    """The journal that a run writes.

    Args:
        folder: the run's.
        step: the step that the run resumes from; 0: it begins.
        before: name of its file in the process before, where the checkpoint knows it.
        position: of the checkpoint in that file, where it knows it.

    Attributes:
        lock: is held while entries are written; a writer that keeps an account of its own holds it around both.

    Raises:
        DataError: the file cannot be read or written.
    """

    def __init__(self, folder: Path, step: int = 0, before: str | None = None, position: Position | None = None):
        # Callers are the threads of the controller: one may sample for a step while another one trains the one before.
        self.lock = threading.RLock()
        self.path, self.step = folder / NAME, step
        self._broken: OSError | None = None
        self._entries, self._kept, self._last = 0, 0, ""
        self._is_idle = True
        try:
            self.path = file_of_run(self.path, step > 0, before)
            if step > 0 and self.path.exists():
                self._resume(position)
            self._file = open(self.path, "ab", buffering=0, opener=private_opener)  # noqa: SIM115  # until `close`
        except OSError as error:
            raise self._failed(error) from error

    def begin(self, writers: Sequence[Writer] = (), **about: Any) -> None:
        """Write the entry of this process, after the writers have taken in what the checkpoint knows.

        Args:
            about: facts about the run, for the first entry that holds.

        Raises:
            DataError: a later release wrote the file, or it cannot be written.
        """
        try:
            for entry in entries_in(self.path, self._kept) if self._kept else ():
                for writer in writers:
                    writer.take_in(entry)
        except (DamagedJournal, KeyError, TypeError, ValueError, IndexError):
            self._kept = 0
        if self.step > 0 and not self._kept:
            notice(NAME, f"{self.path} does not reach the checkpoint of step {self.step}: the account of the samples "
                   "begins there, and no replay can begin before")  # fmt: skip
            for writer in writers:
                writer.start_over()
        facts = {} if self._kept else about
        self.write({"event": RUN, "format": FORMAT, "step": self.step, "after": self._kept, **facts})

    def write(self, *entries: Entry) -> None:
        """Append entries.

        Raises:
            DataError: the file cannot be written; it takes no further entry then, as it may end amid a line.
        """
        lines = [line_of(entry) for entry in entries]
        if not lines:
            return
        with self.lock:
            if self._broken is not None:
                raise self._failed(self._broken)
            rest = b"".join(lines)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._broken = error
                raise self._failed(error) from error
            self._entries, self._last = self._entries + len(lines), check_of(lines[-1])
            self._is_idle &= all(entry["event"] in IDLE and not entry.get("step") for entry in entries)

    def position(self, decisions: int = 0) -> Position:
        """Where the journal is now."""
        with self.lock:
            return Position(self._entries, self._last, decisions)

    def sync(self) -> None:
        """Return once every entry is on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """End the file; one of a run that has begun no step is deleted."""
        self._file.close()
        if self._is_idle:
            self.path.unlink(missing_ok=True)

    def _resume(self, position: Position | None) -> None:
        """Look for what the checkpoint knows, and cut off the part of a line that a killed process may have left."""
        complete = 0
        with self.path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                complete, self._entries, self._last = complete + len(line), self._entries + 1, check_of(line)
                self._is_idle = False
                if position is not None and (self._entries, self._last) == (position.entries, position.check):
                    self._kept = self._entries
            file.truncate(complete)

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"the journal of the run cannot be written: {error.strerror}",
            key=KEY,
            got=str(self.path),
            fix="Make room or mend the folder and start the run again: it continues from its last checkpoint.",
        )


def journal_in(place: Path, kind: str) -> Path | None:
    """The journal that a path names: the file, or the newest one in a run's folder; None: there is none.

    Args:
        kind: of the events that are read; an earlier release wrote a file per kind.
    """
    if not place.is_dir():
        return place if place.is_file() else None
    names = [NAME, *([EARLIER[kind]] if kind in EARLIER else [])]
    return next((path for name in names if (path := newest_file(place / name)) is not None), None)


def entries_in(path: Path, until: int | None = None, replaced: bool = False) -> Iterator[Entry]:
    """The entries of a journal that hold, in their order; a run may be writing it.

    Args:
        until: number of the last entry that is read; None: all are.
        replaced: also those that a resumed run has replaced.

    Raises:
        DamagedJournal: an entry that holds is damaged.
        DataError: a later release wrote the file.
    """
    history = _history(path, until)
    for number, line in _lines(path, [range(1, ENDLESS)] if replaced else history):
        entry = entry_of(line)
        if entry is None:
            if not line.endswith(b"\n"):
                return
            raise DamagedJournal(f"line {number} is not an entry of a journal", got=str(path))
        yield entry


def _lines(path: Path, stretches: Iterable[range]) -> Iterator[tuple[int, bytes]]:
    """The lines of these numbers, from 1, with them."""
    at = 1
    with path.open("rb") as file:
        for stretch in stretches:
            for _ in islice(file, stretch.start - at):  # between two stretches
                pass
            yield from zip(stretch, file)
            at = stretch.stop


def _history(path: Path, until: int | None) -> list[range]:
    """The numbers, from 1, of the entries that hold."""
    runs, last = list[tuple[int, bytes]](), 0
    with path.open("rb") as file:
        for last, line in enumerate(islice(file, until), start=1):
            if line.startswith(RUN_LINE):
                runs.append((last, line))
    stretches = []
    while last > 0:
        while runs and runs[-1][0] > last:
            runs.pop()
        first, line = runs.pop() if runs else (1, b"")
        stretches.append(range(first, last + 1))
        last = _after(line, first, path)
    return stretches[::-1]


def _after(line: bytes, number: int, path: Path) -> int:
    """How many entries before line ``number``, which begins a process, hold; b"": a file that begins without one.

    An earlier release cut off what did not hold: all do.
    """
    if not line.endswith(b"\n"):
        return number - 1
    entry = entry_of(line)
    if entry is not None and entry.get("format", FORMAT) not in range(FORMAT + 1):
        raise DataError(f"a later release wrote {path}, in the format {entry['format']}", allowed=f"up to {FORMAT}")
    after = None if entry is None else entry.get("after", number - 1)
    if type(after) is not int or not 0 <= after < number:
        raise DamagedJournal(f"line {number} is not an entry of a journal", got=str(path))
    return after


def line_of(entry: Entry) -> bytes:
    """An entry with the CRC-32 of its text as its last value: a disk or a hand may change a digit of it."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%s%s%08x%s" % (text[:-1], CHECK, zlib.crc32(text), END)


def check_of(line: bytes) -> str:
    """The checksum of a line, as `line_of` put it there."""
    return line[-len(END) - 8 : -len(END)].decode(errors="replace")


def entry_of(line: bytes) -> Entry | None:
    """One line; None for a damaged one, and for the last one where a kill cut it off.

    Lines of earlier releases have no checksum.
    """
    if not line.endswith(b"\n"):
        return None
    body, mark, check = line.rpartition(CHECK)
    text = body + b"}" if mark and check.endswith(END) else line
    if text is not line and check != b"%08x%s" % (zlib.crc32(text), END):
        return None
    try:
        entry = read_json(text)
        return entry if isinstance(entry["event"], str) else None
    except (ValueError, KeyError, TypeError):
        return None
