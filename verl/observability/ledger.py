"""The ledger of a run: what became of every sample, one JSON line per event, written before anything counts on it.

A line is in the file, whatever happens to the process, as soon as its call returns. A run that goes on from the
checkpoint of step k keeps the lines up to the end of step k; later ones, whose steps it repeats, go to
``<ledger>.replaced.jsonl``. No line holds a time, so two equal runs have equal ledgers.

`verl.observability.ledger_reader` answers questions about it.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.json_text import read_json
from verl.metrics import notice
from verl.observability.account import REASONS, Account, Entry, Key, names_of, ranges
from verl.observability.places import file_of_run, set_aside

CHECK, END = b',"crc":"', b'"}\n'
KEY, NAME, FORMAT = "trainer.ledger", "ledger.jsonl", 1
SAYABLE = frozenset((int, str, bool, type(None)))
"""Types whose every value JSON can say."""


class Ledger:
    """The ledger that a run writes.

    Args:
        folder: the run's.
        step: the step that the run goes on from; 0: it begins.
        before: name of its file so far, where the checkpoint knows it.
        waiting: the samples in flight that the checkpoint holds.

    Raises:
        DataError: the file cannot be read or written.
    """

    def __init__(self, folder: Path, step: int = 0, before: str | None = None, waiting: Sequence[Key] = ()):
        self.account = Account()
        self._next = 0
        self._broken: OSError | None = None
        # Callers are the threads of the controller: one may sample for a step while another one trains the one before.
        self._lock = threading.Lock()
        self.path = folder / NAME
        try:
            self.path = file_of_run(self.path, step > 0, before)
            if step > 0 and self.path.exists():
                self._go_on(step)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        self._write([{"event": "run", "format": FORMAT, "step": step}])
        if step > 0:
            self._compare(step, waiting)

    # ---- events ------------------------------------------------------------------------------------------------

    def asked(self, step: int, epoch: int, keys: Sequence[Key], rows: Sequence[Any] | None = None) -> None:
        """Answers are going to be sampled; from here on each has to be trained on, dropped, or waiting.

        Args:
            rows: the row of the data set of each.
        """
        with self._lock:
            entry: dict[str, Any] = {"event": "asked", "step": step, "epoch": epoch, "first": self._next}
            uids = list(dict.fromkeys(uid for uid, _ in keys))
            each = len(keys) // max(1, len(uids))
            every = slice(None)
            if list(keys) == [(uid, sample) for uid in uids for sample in range(each)]:
                entry, every = {**entry, "each": each, "uid": uids}, slice(None, None, each)
            else:
                entry |= {"uid": [uid for uid, _ in keys], "sample": [sample for _, sample in keys]}
            if rows is not None:
                entry["row"] = [_plain(row) for row in rows[every]]
            self._next += len(keys)
            self._add(entry)

    def noted(self, event: str, step: int, keys: Sequence[Key], **columns: Sequence[Any]) -> None:
        """Something happened to samples in flight: ``sampled``, ``scored``, ``batch``; a column has one value each."""
        with self._lock:
            self._add(self._entry(event, step, keys, {name: _packed(values) for name, values in columns.items()}))

    def moved(self, step: int, requests: Sequence[tuple[str, int, int]]) -> None:
        """A replica was lost with these requests, or taken back, and another one goes on; once for each time.

        Args:
            requests: uid, sample index, and tokens of the response with which it goes on.
        """
        with self._lock:
            for uid, sample, kept in requests:
                key = uid.partition("/")[0], sample  # later turns add their number
                if self.account.ids([key])[0]:
                    self._add(self._entry("moved", step, [key], {"kept": kept}))

    def dropped(self, step: int, reason: str, keys: Sequence[Key]) -> None:
        """Samples that will not be trained on.

        Raises:
            KeyError: the reason is none of `REASONS`.
        """
        if keys:
            with self._lock:
                self._add(self._drop(step, reason, keys))

    def trained(self, step: int, keys: Sequence[Key], dropped: Mapping[str, Sequence[Key]]) -> None:
        """An update was made with a batch: of these samples, and not of those that were dropped from it."""
        with self._lock:
            entries = [self._drop(step, reason, left_out) for reason, left_out in dropped.items() if left_out]
            self._add(*entries, self._entry("trained", step, keys, {"version": step}))

    def end(self, step: int, saved: bool = False) -> None:
        """A step is complete and logged. Where its checkpoint is put in place next, the lines are on the disk first."""
        with self._lock:
            self._add({"event": "end", "step": step})
            if saved:
                try:
                    os.fsync(self._file.fileno())
                except OSError as error:
                    raise self._failed(error) from error

    def check(self, waiting: Sequence[Key]) -> None:
        """At the end of a run: sampled = trained + dropped + waiting, none is lost, and none was trained twice.

        Args:
            waiting: all samples that are somewhere in the run now.

        Raises:
            DataError: with the names of the samples that are at fault.
        """
        account = self.account
        lost, faults = account.missing(waiting), list(account.faults)
        if lost:
            faults.append(f"{len(lost)} samples were lost: {names_of(lost)}")
        settled = account.trained + account.dropped.total() + len(account.open)
        if account.sampled != settled:
            faults.append(f"{account.sampled} samples were asked for, and {settled} are accounted for")
        if faults:
            raise DataError(
                f"the account of the samples does not balance: {names_of(faults)}",
                key=KEY,
                got=str(self.path),
                fix=f"python -m verl.observability.ledger_reader {self.path} shows them. The weights are those of the "
                "samples that were trained on.",
            )

    def close(self) -> None:
        self._file.close()
        if not self._next:
            self.path.unlink(missing_ok=True)  # no sample was ever asked for

    # ---- the file ----------------------------------------------------------------------------------------------

    def _entry(self, event: str, step: int, keys: Sequence[Key], columns: Mapping[str, Any]) -> dict[str, Any]:
        known, unknown = self.account.ids(keys)
        entry = {"event": event, "step": step, "ids": ranges(known), **columns}
        return {**entry, "unknown": unknown} if unknown else entry

    def _drop(self, step: int, reason: str, keys: Sequence[Key]) -> dict[str, Any]:
        if reason not in REASONS:
            raise KeyError(reason)
        return self._entry("dropped", step, keys, {"reason": reason})

    def _add(self, *entries: Entry) -> None:
        for entry in entries:
            self.account.apply(entry)
        self._write(entries)

    def _write(self, entries: Iterable[Entry]) -> None:
        lines = b"".join(map(line_of, entries))
        if self._broken is not None:  # half a line may be the last thing in the file
            raise self._failed(self._broken)
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError as error:
            self._broken = error
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DataError:
        return DataError(
            f"the ledger of the samples cannot be written: {error.strerror}",
            key=KEY,
            got=str(self.path),
            fix="Make room or mend the folder and start the run again: it goes on from its last checkpoint. "
            f"{KEY}=false runs without a ledger.",
        )

    def _go_on(self, step: int) -> None:
        """Keep what is before the end of a step, and set the rest aside."""
        length = kept = 0
        with self.path.open("rb") as file:
            for line in file:
                entry = entry_of(line)
                if entry is None or kept:
                    break
                try:
                    self.account.apply(entry)
                    self._next += asked_in(entry)
                    is_there = entry["event"] == "end" and int(entry["step"]) == step
                except (KeyError, TypeError, ValueError, IndexError):  # damaged
                    break
                length += len(line)
                kept = length if is_there else 0
        if not kept:
            notice(KEY, f"{self.path} does not reach step {step}, from which the run goes on: the account begins there")
            self.account, self._next = Account(), 0
        set_aside(self.path, kept)

    def _compare(self, step: int, waiting: Sequence[Key]) -> None:
        """After a resume: only what the checkpoint holds is in flight."""
        _, unknown = self.account.ids(waiting)
        if unknown:
            self.asked(step, 0, unknown)
        gone = [(one.uid, one.sample) for one in self.account.missing(waiting)]
        self.dropped(step, "repeated", gone)


def asked_in(entry: Entry) -> int:
    """How many samples an entry asks for."""
    if entry["event"] != "asked":
        return 0
    return len(entry["uid"]) * int(entry.get("each", 1))


def line_of(entry: Entry) -> bytes:
    """An entry with the CRC-32 of its text as its last value: a disk or a hand may change a digit of it."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%s%s%08x%s" % (text[:-1], CHECK, zlib.crc32(text), END)


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


def _packed(values: Sequence[Any]) -> Any:
    """One value where all are equal."""
    plain = [value if type(value) in SAYABLE else _plain(value) for value in values]
    return plain[0] if plain and not isinstance(plain[0], list) and plain.count(plain[0]) == len(plain) else plain


def _plain(value: Any) -> Any:
    """What JSON can say: numpy's numbers as Python's, NaN and infinities as null, anything else as its text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)[:200]


def lines_of(path: Path) -> Iterator[Entry]:
    """The entries of a ledger, which a run may be writing.

    Raises:
        DataError: a line before the last is damaged.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            entry = entry_of(line)
            if entry is None:
                if line.endswith(b"\n"):
                    raise DataError(f"line {number} is not an entry of a ledger", got=str(path))
                return
            yield entry
