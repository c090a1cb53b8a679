"""All samples of a run as columns in memory, in which every filter and page is computed; texts stay on the disk."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import DataError, suggest
from verl.journal.columns import DROPPED, TRAINED, Lineage, Names
from verl.observability.stored_samples import INDEX, UNREADABLE, StepSamples, read_lines, read_parquet
from verl.viewer.folder import STEP_FILE
from verl.viewer.questions import NoSuchThing, Question, Row

READ_SECONDS, SEARCH_SECONDS = 0.3, 0.6
"""For which one request reads files into the index, and searches in texts; the next request continues."""
SEARCH_THREADS = 2
"""They decompress and compare texts at the same time."""
STATES = ("trained", "waiting", "dropped")
EXCERPT = 200
"""Characters of a text in a table."""
SORTS = ("step", "uid", "row", "score", "length", "finish", "staleness", "clipped", "state", "reason")
LEDGER = "L"
"""How the id of a sample begins that only the journal knows."""
TURNS = 2
"""Of a question and its answer. With more, files count inserted tokens, too; the journal only sampled ones."""
Signature = tuple[tuple[Path, int, int], ...]
"""Of a step: (path, size, time) of its files."""
SEARCHES = 16
"""Texts whose matches are kept."""


@dataclass
class Matches:
    """The rows of the index that a question is about, in its order.

    Args:
        searched: files in which a text was looked for, of ``files`` that are to be searched.
    """

    rows: np.ndarray
    searched: int = 0
    files: int = 0


@dataclass
class SampleIndex:
    """The samples of a run's files, and those that only its journal knows.

    Attributes:
        version: another number after each change.
        notices: by file, what was left out.
        pending: files that are not in the index yet.
    """

    uids: Names = field(default_factory=Names)
    finishes: Names = field(default_factory=Names)
    reasons: Names = field(default_factory=lambda: Names([""]))
    version: int = 0
    notices: dict[Path, str] = field(default_factory=dict)
    pending: int = 0
    _blocks: dict[int, StepSamples] = field(default_factory=dict)
    _read: dict[int, Signature] = field(default_factory=dict)
    _columns: dict[str, np.ndarray] = field(default_factory=dict)
    _order: list[StepSamples] = field(default_factory=list)
    _built: tuple[int, int] | None = None
    _searches: dict[str, dict[int, tuple[StepSamples, np.ndarray]]] = field(default_factory=dict)

    # ---- reading -----------------------------------------------------------------------------------------------

    def refresh(self, folder: Path | None, allowed: Callable[[Path], Path | None]) -> None:
        """Take in files that are new or were replaced, the newest steps first, for at most `READ_SECONDS`.

        Args:
            allowed: the file behind a link; None: the link leads out of the run.
        """
        self.pending = 0
        files = {} if folder is None else _files(folder, allowed)
        # A file that was replaced may wait for a later request: until then nothing reads it by its former index.
        outdated = {step for step, signature in self._read.items() if files.get(step) != signature}
        for step in outdated:
            del self._read[step]
            self._blocks.pop(step, None)
            self.version += 1
        present = {path for signature in files.values() for path, *_ in signature}
        self.notices = {path: text for path, text in self.notices.items() if path in present}
        until = time.monotonic() + READ_SECONDS
        waiting = files.keys() - self._read.keys()
        self.pending = len(waiting)
        for step in sorted(waiting, reverse=True):
            self._take(step, files[step])
            self.pending -= 1
            if time.monotonic() > until:
                break

    def _take(self, step: int, signature: Signature) -> None:
        self._read[step], self.version = signature, self.version + 1
        for path, *_ in signature:
            self.notices.pop(path, None)
            try:
                if path.suffix == ".parquet":
                    block = read_parquet(path, step, self.uids, self.finishes, self.reasons)
                else:
                    block = read_lines(path, step, self.uids, self.finishes)
            except (*UNREADABLE, DataError) as error:
                self.notices[path] = f"{path} cannot be read, its samples are left out: {error}"
                continue
            if block.notice:
                self.notices[path] = block.notice
            self._blocks[step] = block
            return

    @property
    def kind(self) -> str:
        """``tokens``, ``texts`` or ``none``."""
        if not self._blocks:
            return "none"
        return "tokens" if any(block.has_tokens for block in self._blocks.values()) else "texts"

    @property
    def files(self) -> int:
        """In the index."""
        return len(self._blocks)

    def build(self, lineage: Lineage) -> dict[str, np.ndarray]:
        """The columns of all samples: those of `INDEX`, and where each sample is and what became of it.

        ``block`` is the number of the file, ``place`` the row in it; a sample that only the journal knows has -1 and
        its number there. ``ledger`` is the number in the journal, ``state`` a place in `STATES`.
        """
        if self._built == (self.version, lineage.version):
            return self._columns
        self._columns = {}  # the former ones make room for these
        self._order = [self._blocks[step] for step in sorted(self._blocks)]
        count = sum(map(len, self._order))
        numbers = lineage.find(self._joined("uid", np.empty(0)), self._joined("sample", np.empty(0)))
        ledger = _with_lengths(lineage.columns)
        is_left = ledger["uid"] >= 0
        is_left[numbers[numbers >= 0]] = False
        rest = np.flatnonzero(is_left)
        settled = np.where(ledger["settled"][rest] >= 0, ledger["settled"][rest], ledger["step"][rest])
        columns = {name: self._joined(name, ledger[name][rest]) for name in INDEX if name != "clipped"}
        columns["clipped"] = self._joined("clipped", np.full(len(rest), np.nan))
        sizes = [len(block) for block in self._order]
        columns["step"] = np.append(np.repeat([block.step for block in self._order], sizes), settled).astype(np.int32)
        columns["block"] = np.append(np.repeat(np.arange(len(sizes)), sizes), np.full(len(rest), -1)).astype(np.int32)
        places = [np.arange(size, dtype=np.int32) for size in sizes]
        columns["place"] = np.concatenate([*places, rest.astype(np.int32)])
        columns["ledger"] = np.append(numbers, rest).astype(np.int32)
        _fill(columns, ledger, count)
        self._columns, self._built = _with_states(columns, ledger), (self.version, lineage.version)
        return self._columns

    def _joined(self, name: str, last: np.ndarray) -> np.ndarray:
        """A column of all files, and these values behind it."""
        kind = INDEX[name]
        return np.concatenate([*(block.columns[name] for block in self._order), last.astype(kind)])

    # ---- questions ---------------------------------------------------------------------------------------------

    def matches(
        self, question: Question, columns: Mapping[str, np.ndarray], seconds: float = SEARCH_SECONDS
    ) -> Matches:
        """The samples that pass the filters of a question, in its order.

        Args:
            seconds: for which a text is searched; the next question continues.

        Raises:
            DataError: a filter has no such value.
        """
        passes = np.ones(len(columns["step"]), dtype=bool)
        for name in ("step", "row"):
            if question.text(name):
                passes &= columns[name] == question.count(name, 0)
        for name, names in (("uid", self.uids), ("finish", self.finishes), ("reason", self.reasons)):
            if text := question.text(name):
                passes &= columns[name] == _number_of(names, name, text)
        if state := question.text("state", "", ("", *STATES)):
            passes &= columns["state"] == STATES.index(state)
        for name, least, most in (
            ("score", "min_score", "max_score"), ("length", "min_length", "max_length"),
            ("staleness", "min_staleness", ""), ("clipped", "min_clipped", ""),
        ):  # fmt: skip
            low = question.number(least)
            high = question.number(most) if most else None
            if low is not None:
                passes &= columns[name] >= low
            if high is not None:
                passes &= (columns[name] <= high) & (columns[name] != -1 if name == "length" else True)
        text, order = question.text("text"), self._sorting(question)
        searched = files = 0
        if text:
            searched, files = self._search(text, passes, columns, seconds)
        rows = np.flatnonzero(passes)
        return Matches(rows[order(columns, rows)], searched, files)

    def _sorting(self, question: Question) -> Callable[[Mapping[str, np.ndarray], np.ndarray], np.ndarray]:
        name = question.text("sort", "", ("", *SORTS))
        descending = question.flag("descending") if name else True
        name = name or "step"

        def order(columns: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
            values = columns[name][rows].astype(float)
            names = {"uid": self.uids, "finish": self.finishes, "reason": self.reasons}.get(name)
            if names is not None:
                ranks = np.empty(len(names.texts))
                ranks[np.argsort(np.array(names.texts, dtype=object), kind="stable")] = np.arange(len(names.texts))
                is_named = values >= 0
                values[is_named] = ranks[values[is_named].astype(int)]
            if name not in ("score", "clipped"):
                values[values < 0] = np.nan  # not known: at the end in both directions
            return np.argsort(-values if descending else values, kind="stable")

        return order

    def _search(
        self, text: str, passes: np.ndarray, columns: Mapping[str, np.ndarray], seconds: float
    ) -> tuple[int, int]:
        """Leave those passes whose prompt or response has the text, newest files first.

        Returns:
            Files that are searched, and those that are to be.
        """
        done = self._searches.pop(text, {})
        self._searches[text] = done
        while len(self._searches) > SEARCHES:
            del self._searches[next(iter(self._searches))]
        passes &= columns["block"] >= 0  # the journal has no texts
        blocks = np.unique(columns["block"][passes])[::-1].tolist()
        until = time.monotonic() + seconds

        def matches_in(number: int) -> np.ndarray | None:
            block = self._order[number]
            before, matches = done.get(block.step, (None, None))
            if before is not block:
                matches = self._contains(block, text) if time.monotonic() <= until else None
            return matches

        with ThreadPoolExecutor(SEARCH_THREADS, "viewer search") as pool:
            results = list(pool.map(matches_in, blocks))
        starts = np.searchsorted(columns["block"][: int((columns["block"] >= 0).sum())], np.arange(len(self._order)))
        for number, matches in zip(blocks, results):
            block = self._order[number]
            passes[starts[number] : starts[number] + len(block)] &= False if matches is None else matches
            if matches is not None:
                done[block.step] = block, matches
        return sum(matches is not None for matches in results), len(blocks)

    def _contains(self, block: StepSamples, text: str) -> np.ndarray:
        try:
            return block.contains(text)
        except UNREADABLE as error:
            self._note(block, error)
            return np.zeros(len(block), dtype=bool)

    def _note(self, block: StepSamples, error: Exception) -> None:
        self.notices[block.path] = f"{block.path} was deleted or replaced while it was read: {error}"

    def ids(self, columns: Mapping[str, np.ndarray], rows: np.ndarray) -> list[str]:
        """The id of each row."""
        values = zip(columns["block"][rows].tolist(), columns["step"][rows].tolist(), columns["place"][rows].tolist())
        return [f"{LEDGER}{place}" if block < 0 else f"{step}-{place}" for block, step, place in values]

    def row_of(self, identity: str, columns: Mapping[str, np.ndarray]) -> int:
        """The row of an id.

        Raises:
            NoSuchThing: there is none, or its file was deleted since.
        """
        head, dash, tail = identity.partition("-")
        if not identity.isascii():
            is_row = np.zeros(1, dtype=bool)
        elif identity.startswith(LEDGER) and identity[1:].isdecimal() and len(identity) <= 10:
            is_row = (columns["block"] < 0) & (columns["place"] == int(identity[1:]))
        elif dash and head.isdecimal() and tail.isdecimal() and len(identity) < 32:
            is_row = (columns["block"] >= 0) & (columns["step"] == int(head)) & (columns["place"] == int(tail))
        else:
            is_row = np.zeros(1, dtype=bool)
        if not is_row.any():
            raise NoSuchThing(
                "no such sample", key="id", got=identity[:50], fix="Its file may be deleted; search again."
            )
        return int(np.argmax(is_row))

    def texts(self, columns: Mapping[str, np.ndarray], rows: np.ndarray, name: str, characters: int) -> list[str]:
        """The beginning of ``input`` or ``output`` of each row; empty where no file has it, with a notice if it had."""
        made = [""] * len(rows)
        blocks, places = columns["block"][rows], columns["place"][rows]
        for number in np.unique(blocks[blocks >= 0]).tolist():
            at, block = np.flatnonzero(blocks == number), self._order[number]
            try:
                texts = block.texts(places[at].tolist(), name, characters)
            except UNREADABLE as error:
                self._note(block, error)
                continue
            for place, text in zip(at.tolist(), texts):
                made[place] = text
        return made

    def described(self, columns: Mapping[str, np.ndarray], rows: np.ndarray) -> list[Row]:
        """The short values of each row, for a table."""
        texts = {"uid": self.uids.texts, "finish": self.finishes.texts, "reason": self.reasons.texts, "state": STATES}
        made: dict[str, list[Any]] = {"id": self.ids(columns, rows)}
        for name in SORTS:
            values = columns[name][rows].tolist()
            if name in texts:
                made[name] = [(texts[name][value] or None) if value >= 0 else None for value in values]
            elif name in ("score", "clipped", "step"):
                made[name] = values
            else:
                made[name] = [None if value < 0 else value for value in values]
        return [dict(zip(made, row)) for row in zip(*made.values())]

    def record(self, columns: Mapping[str, np.ndarray], row: int) -> Row:
        """What the file has of a row; empty for one without a file.

        Raises:
            NoSuchThing: the file is gone.
        """
        number = int(columns["block"][row])
        if number < 0:
            return {}
        try:
            return self._order[number].record(int(columns["place"][row]))
        except UNREADABLE as error:
            raise NoSuchThing(f"the file of this sample cannot be read: {error}", key="id") from error


def _files(folder: Path, allowed: Callable[[Path], Path | None]) -> dict[int, Signature]:
    """Step -> (path, size, time) of its files, parquet first."""
    made: dict[int, list[tuple[Path, int, int]]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = STEP_FILE.fullmatch(entry.name)
            if match is None:
                continue
            place = Path(entry.path)
            if entry.is_symlink() and allowed(place) is None:
                continue
            try:
                status = entry.stat()
            except OSError:  # deleted meanwhile, or a link to nothing
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            made.setdefault(int(match[1][:9]), []).append((place, status.st_size, status.st_mtime_ns))
    return {step: tuple(sorted(files, key=lambda one: one[0].suffix != ".parquet")) for step, files in made.items()}


def _fill(columns: dict[str, np.ndarray], known: Mapping[str, np.ndarray], count: int) -> None:
    """Take from the journal what the files do not say of their ``count`` samples."""
    at = np.flatnonzero(columns["ledger"][:count] >= 0)
    numbers = columns["ledger"][at]
    for name in ("length", "finish", "oldest_version", "row", "reason"):
        missing = columns[name][at] < 0
        columns[name][at[missing]] = known[name][numbers[missing]]


def _with_lengths(ledger: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add ``length`` in tokens of the response; -1 where the journal cannot know it."""
    return {**ledger, "length": np.where(ledger["turns"] <= TURNS, ledger["tokens"], -1)}


def _with_states(columns: dict[str, np.ndarray], known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add ``state`` as a place in `STATES`, and ``staleness`` in versions; -1: not known."""
    reason, ledger = columns["reason"], columns["ledger"]
    stage = np.append(known["stage"], np.int8(-1))[ledger]  # a sample without a number takes the last one
    state = np.select(
        [reason > 0, (reason == 0) | (stage == TRAINED), stage == DROPPED, stage >= 0], [2, 0, 2, 1], default=-1
    )
    oldest = columns["oldest_version"]
    staleness = np.where(oldest >= 0, columns["step"] - 1 - oldest, -1)
    return {**columns, "state": state.astype(np.int8), "staleness": staleness.astype(np.int32)}


def _number_of(names: Names, name: str, text: str) -> int:
    number = names.known(text)
    if number < 0:
        choices = names.texts if len(names.texts) <= 1000 else []
        raise DataError("no sample has this value", key=name, got=text, fix=suggest(text, choices))
    return number
