"""The journal of a run: one JSON line per event, appended before anything counts on the event.

A line is in the file, whatever happens to the process, as soon as its call returns, and no line is ever changed. Each
process of the run begins with an entry ``run``, which says after how many entries of the file it continues
(``after``): those that the checkpoint knows. What the process before it wrote later no longer holds, since its steps
are repeated. `entries_in` follows these entries back from the last one, and gives the history of a run that nothing
interrupted. Every line ends with the CRC-32 of its text.

It is split into segments: ``journal.jsonl``, ``journal.0002.jsonl`` and so on. A segment begins with an entry ``run``,
which has the checksum of the entry before it and the state of the writers: what is older can be dropped. Readers stream
the segments in order. A line ``next``, which is no entry, names the segment that follows.
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from verl.errors import DataError
from verl.journal.places import file_of_run, newest_file, private_opener
from verl.json_text import read_json
from verl.metrics import notice

Entry = Mapping[str, Any]
"""One line of a journal."""
RUN, NEXT, NAME, FORMAT = "run", "next", "journal.jsonl", 3
POSITION = "journal.json"
"""In a checkpoint."""
KEY, LIMIT = "trainer.default_local_dir", "trainer.journal_max_bytes"
EARLIER = {"samples": "ledger.jsonl", "decisions": "schedule.jsonl"}
"""Files of releases that had one per kind of event; these two are still read."""
CHECK, END, RUN_LINE, NEXT_LINE = b',"crc":"', b'"}\n', b'{"event":"run"', b'{"event":"next"'
ENDLESS, COPY = 1 << 62, "Copy all segments again from where the run wrote them."
SEGMENTS, SEGMENT_BYTES = 16, 1 << 26
"""Segments within the bound, and the size of one in a journal without a bound."""
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
            position = read_json((checkpoint / POSITION).read_bytes())
            return cls(int(position["entries"]), str(position["check"]), int(position["decisions"]))
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

    def state(self) -> Mapping[str, Any]:
        """What all entries come to: `take_in` of an entry ``run`` that has it, as the first one, restores it."""


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
        self.path, self.step, self._segment = folder / NAME, step, 1
        self._writers: Sequence[Writer] = ()
        self._about: Mapping[str, Any] = {}
        self._broken: OSError | None = None
        self._entries, self._kept, self._last = 0, 0, ""
        self._is_idle = True
        try:
            self.path = file_of_run(self.path, step > 0, before)
            if step > 0 and self.path.exists():
                self._resume(position)
            self._file = FileIO(_segment(self.path, self._segment), "ab", opener=private_opener)
        except OSError as error:
            raise self._failed(error) from error

    def begin(self, writers: Sequence[Writer] = (), **about: Any) -> None:
        """Write the entry of this process, after the writers have taken in what the checkpoint knows.

        Args:
            about: facts about the run, for the first entry that holds.

        Raises:
            DataError: a later release wrote the file, or it cannot be written.
        """
        self._writers = writers
        try:
            for entry in entries_in(self.path, self._kept) if self._kept else ():
                if entry["event"] == RUN and not self._about:
                    self._about = {name: value for name, value in entry.items() if name not in ("state", "check")}
                for writer in writers:
                    writer.take_in(entry)
        except (DamagedJournal, KeyError, TypeError, ValueError, IndexError):
            self._kept = 0
        if self.step > 0 and not self._kept:
            notice(NAME, f"{self.path} does not reach the checkpoint of step {self.step}: the account of the samples "
                   "begins there, and no replay can begin before")  # fmt: skip
            for writer in writers:
                writer.start_over()
        self._about = self._about if self._kept else about
        self.write(self._run(self.step, self._kept))

    def rotate(self, step: int, needed: Position | None = None, limit: int | None = None) -> None:
        """Begin another segment once this one is full, and drop the oldest ones beyond the bound.

        Args:
            step: the last complete one.
            needed: of the newest checkpoint. A resumed run reads on from there, which is therefore never dropped.
            limit: bytes of all segments; None: no bound.

        Raises:
            DataError: the entries cannot be brought to the disk.
        """
        size = SEGMENT_BYTES if limit is None else limit // SEGMENTS
        with self.lock:
            if os.fstat(self._file.fileno()).st_size < size:
                return
            self.sync()
            head = entry_line({**self._run(step, self._entries), "check": self._last})
            try:
                self._begin_segment(head)
                if limit is not None:
                    self._drop(needed, limit - 2 * size)  # the one in use ends with the step that fills it
            except (OSError, DamagedJournal) as error:
                notice(LIMIT, f"{self.path} cannot be rotated: {error}. It is tried again")

    def _begin_segment(self, head: bytes) -> None:
        """A kill at any point leaves the next segment with its first line, or none; an error leaves this one in use."""
        full, self._file = self._file, _new_file(_segment(self.path, self._segment + 1), head)
        self._segment += 1
        with full, suppress(OSError):  # it only tells those who copied this file that there is another one
            _write(full, _next_line(self._segment, self._entries, self._last))
        self._entries, self._last = self._entries + 1, check_of(head)

    def _drop(self, needed: Position | None, room: int) -> None:
        """Drop the oldest segments until those before the one in use have room; `needed` and the last of them stay."""
        places = segments_of(self.path)
        closed = list(places)[:-1]
        total, oldest = sum(places[segment].stat().st_size for segment in closed), closed[0]
        for segment, following in pairwise(closed):
            if total <= room or (needed is not None and _head_of(places[following])["after"] >= needed.entries):
                break
            total, oldest = total - places[segment].stat().st_size, following
        if total > room:
            notice(LIMIT, f"{self.path} exceeds the bound: a resumed run needs what was written since the newest "
                   "checkpoint. Save more often (trainer.save_freq), or raise it")  # fmt: skip
        if oldest == closed[0]:
            return
        head = _head_of(places[oldest])
        _new_file(self.path, _next_line(oldest, head["after"], head["check"])).close()
        # After that no reader looks for the others.
        for segment in closed:
            if 1 < segment < oldest:
                places[segment].unlink()

    def _run(self, step: int, after: int) -> dict[str, Any]:
        """The entry of a process or a segment, with what a reader needs once all before it is dropped."""
        entry = {"event": RUN, **self._about, "format": FORMAT, "step": step, "after": after}
        state = {name: value for writer in self._writers for name, value in writer.state().items()}
        return {**entry, "state": state} if after else entry

    def write(self, *entries: Entry) -> None:
        """Append entries.

        Raises:
            DataError: the file cannot be written; it takes no further entry then, as it may end amid a line.
        """
        lines = [entry_line(entry) for entry in entries]
        if not lines:
            return
        with self.lock:
            if self._broken is not None:
                raise self._failed(self._broken)
            try:
                _write(self._file, b"".join(lines))
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
        """Look for what the checkpoint knows, and cut off the part of a line that a killed process may have left.

        A journal whose segments do not follow from each other stays as it is, and another one begins.
        """
        self._segment = max(segments_of(self.path))
        try:
            for number, line in _stream(self.path):
                if not line.endswith(b"\n"):
                    place = _segment(self.path, self._segment)
                    os.truncate(place, place.stat().st_size - len(line))
                    break
                self._entries, self._last, self._is_idle = number, check_of(line), False
                if position is not None and (number, self._last) == (position.entries, position.check):
                    self._kept = number
        except DamagedJournal as error:
            self.path = file_of_run(self.path.with_name(NAME))
            self._entries, self._kept, self._last, self._segment = 0, 0, "", 1
            notice(f"{NAME}, segments", f"this run writes {self.path}: {error}")

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
        place = place.with_name(re.sub(r"^(journal(?:-\d+)?)\.\d{4,}(?=\.jsonl$)", r"\1", place.name))  # of a segment
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
    history, begins = _history(path, until), True
    for number, line in _lines(path, [range(1, ENDLESS)] if replaced else history):
        entry = parse_entry(line)
        if entry is None:
            if not line.endswith(b"\n"):
                return
            raise _damaged(path, number)
        if begins and "state" in entry:
            notice(f"{NAME}, first steps", f"{path} has the steps after {entry['step']} and the totals until there: "
                   f"its older segments were dropped ({LIMIT})")  # fmt: skip
        begins = False
        yield entry


class Follower:
    """Reads a journal that grows: every entry that holds once, and all of them again after a resumed run replaced some.

    Args:
        path: of the journal.
    """

    def __init__(self, path: Path):
        self.path = path
        self._number, self._segment, self._offset = 0, 0, 0

    def fresh(self) -> tuple[bool, Iterator[Entry]]:
        """(whether the entries begin again, those that are new); the iterator has to be exhausted.

        Raises:
            DamagedJournal: an entry that holds is damaged; raised by the iterator, too.
            DataError: a later release wrote the file.
        """
        lines = self._new_lines() if self._segment else None
        if lines is not None:
            return False, self._parsed(lines)
        return True, self._all()

    def _all(self) -> Iterator[Entry]:
        self._segment, last = 0, 0
        for last, line in _lines(self.path, _history(self.path, None)):
            entry = parse_entry(line)
            if entry is None:
                if line.endswith(b"\n"):
                    raise _damaged(self.path, last)
                last -= 1
                break
            yield entry
        places = segments_of(self.path)
        heads = {segment: _head_of(place)["after"] if segment > 1 else 0 for segment, place in places.items()}
        segment = max(segment for segment, after in heads.items() if segment == 1 or after < last)
        with _opened(places[segment]) as file:
            for _ in range(last - heads[segment]):
                file.readline()
            self._number, self._segment, self._offset = last, segment, file.tell()

    def _new_lines(self) -> list[bytes] | None:
        """Complete lines behind the last one; None where they continue from an earlier entry, or segments are gone."""
        lines: list[bytes] = []
        number, segment, offset = self._number, self._segment, self._offset
        places = segments_of(self.path)
        while segment in places:
            with _opened(places[segment]) as file:
                if os.fstat(file.fileno()).st_size < offset:
                    return None
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n") or line.startswith(NEXT_LINE):
                        break
                    number += 1
                    if line.startswith(RUN_LINE) and _after(line, number, self.path) != number - 1:
                        return None
                    lines.append(line)
                    offset += len(line)
            if segment + 1 not in places:
                self._number, self._segment, self._offset = number, segment, offset
                return lines
            segment, offset = segment + 1, 0
        return None

    def _parsed(self, lines: Iterable[bytes]) -> Iterator[Entry]:
        for line in lines:
            entry = parse_entry(line)
            if entry is None:
                raise DamagedJournal("a new line of the journal is not an entry", got=str(self.path))
            yield entry


def segments_of(path: Path) -> dict[int, Path]:
    """The files of a journal by the number of the segment; 1 is the journal's own path."""
    pattern = re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}")
    names = filter(None, map(pattern.fullmatch, os.listdir(path.parent)))
    return {1: path, **dict(sorted((int(name[1]), path.with_name(name[0])) for name in names))}


def _segment(path: Path, segment: int) -> Path:
    return path if segment == 1 else path.with_name(f"{path.stem}.{segment:04d}{path.suffix}")


def _stream(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line with its number, from 1 or the first one that is kept; the last one may be a part of a line.

    Raises:
        DamagedJournal: a segment is missing, or does not follow from the one before it.
        DataError: a later release wrote a segment.
    """
    segment, number, check, last = 1, 0, "", b""
    while segment:
        # Before it is read: a run may be writing, and begin the next one meanwhile.
        follows = segment + 1 if max(segments_of(path)) > segment else 0
        place, line = _segment(path, segment), b"\n"
        if segment > 1:
            _check_head(place, number, check)
        with _opened(place) as file:
            for line in file:
                if line.startswith(NEXT_LINE) or not line.endswith(b"\n"):
                    break
                number, last = number + 1, line
                yield number, line
        check = check_of(last)
        if not line.endswith(b"\n"):
            if not follows:
                yield number + 1, line
        elif line.startswith(NEXT_LINE):
            entry = parse_entry(line)
            if entry is None:
                raise DamagedJournal("the line that names the next segment is damaged", got=str(place))
            follows = entry["segment"]
            if not number:  # in place of segments that were dropped
                number, check = entry["after"], entry["check"]
        segment = follows


def _opened(place: Path) -> BinaryIO:
    """A segment; the run that writes the journal may drop it between two looks at the folder."""
    try:
        return place.open("rb")
    except FileNotFoundError as error:
        fix = "Read the journal again; if that is no help, copy all of its segments again."
        raise DamagedJournal("a segment of the journal is missing", got=str(place), fix=fix) from error


def _check_head(place: Path, number: int, check: str) -> None:
    """A segment follows from the entry of this number and checksum."""
    if not place.exists():
        raise DamagedJournal("a segment of the journal is missing", got=str(place), fix=COPY)
    head = _head_of(place)
    if (head["after"], head.get("check")) != (number, check):
        message = (
            "a segment does not follow from the one before it: one of the two is cut short, changed or of another run"
        )
        raise DamagedJournal(message, got=str(place), fix=COPY)


def _head_of(place: Path) -> Entry:
    """The first entry of a segment."""
    with _opened(place) as file:
        line = file.readline()
    head = parse_entry(line)
    if head is None or _after(line, ENDLESS, place) is None or "after" not in head:
        raise DamagedJournal("the first line of a segment is damaged", got=str(place))
    return head


def _next_line(segment: int, after: int, check: str) -> bytes:
    return entry_line({"event": NEXT, "segment": segment, "after": after, "check": check})


def _damaged(path: Path, number: int) -> DamagedJournal:
    """The error that an entry is none, with its line in the segment that has it."""
    begins = [(int(_head_of(place)["after"]), place) for segment, place in segments_of(path).items() if segment > 1]
    before, place = max(begin for begin in [(0, path), *begins] if begin[0] < number)
    return DamagedJournal(f"line {number - before} is not an entry of a journal", got=str(place))


def _lines(path: Path, stretches: Iterable[range]) -> Iterator[tuple[int, bytes]]:
    """The lines of these numbers, with them."""
    lines = _stream(path)
    for stretch in stretches:
        for number, line in lines:
            if number in stretch:
                yield number, line
            if number + 1 >= stretch.stop:
                break


def _history(path: Path, until: int | None) -> list[range]:
    """The numbers of the entries that hold, as far back as the journal has them."""
    runs, first, last = list[tuple[int, int | None]](), 0, 0
    for last, line in _stream(path):
        first = first or last
        if line.startswith(RUN_LINE):
            runs.append((last, _after(line, last, path)))
        if last == until:
            break
    stretches = []
    while last >= first > 0:
        while runs and runs[-1][0] > last:
            runs.pop()
        begin, after = runs.pop() if runs else (first, 0)
        if after is None:
            raise _damaged(path, begin)
        stretches.append(range(begin, last + 1))
        last = after
    return stretches[::-1]


def _after(line: bytes, number: int, path: Path) -> int | None:
    """How many entries before line ``number``, which begins a process or a segment, hold; None: it is damaged.

    An earlier release cut off what did not hold: all do.
    """
    if not line.endswith(b"\n"):
        return number - 1
    entry = parse_entry(line)
    if entry is not None and entry.get("format", FORMAT) not in range(FORMAT + 1):
        raise DataError(f"a later release wrote {path}, in the format {entry['format']}", allowed=f"up to {FORMAT}")
    after = None if entry is None else entry.get("after", number - 1)
    return after if type(after) is int and 0 <= after < number else None


def _write(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _new_file(place: Path, line: bytes) -> FileIO:
    """Put a file with this line on the disk, in one step; a kill or an error leaves what was there, and a ``.new``."""
    new = place.with_suffix(".new")
    file = FileIO(new, "wb", opener=private_opener)
    _write(file, line)
    os.fsync(file.fileno())
    new.replace(place)
    # Past the rename the file is in use. Some network file systems refuse to bring a folder to the disk.
    with suppress(OSError):
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return file


def entry_line(entry: Entry) -> bytes:
    """An entry with the CRC-32 of its text as its last value: a disk or a hand may change a digit of it."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%s%s%08x%s" % (text[:-1], CHECK, zlib.crc32(text), END)


def check_of(line: bytes) -> str:
    """The checksum of a line, as `entry_line` put it there."""
    return line[-len(END) - 8 : -len(END)].decode(errors="replace")


def parse_entry(line: bytes) -> Entry | None:
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
