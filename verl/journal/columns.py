"""What the journal says of every sample and every stage, as columns: those of a million samples take 60 MB."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import DataError
from verl.journal.account import MOST_ASKED, REASONS
from verl.journal.file import RUN, Entry, Follower, journal_in, segments_of
from verl.journal.ledger_reader import WAITING
from verl.journal.spans import EVENT, Span, is_resumed, span_of
from verl.json_text import JsonObject

KINDS = {
    "uid": np.int32, "sample": np.int32, "row": np.int64, "step": np.int32, "stage": np.int8, "reason": np.int8,
    "settled": np.int32, "batch": np.int32, "tokens": np.int32, "turns": np.int32, "finish": np.int16,
    "oldest_version": np.int32, "newest_version": np.int32, "score": np.float64,
}  # fmt: skip
"""Columns by the number of a sample in the ledger -> type; -1, or NaN, where nothing is known."""
STAGES = (*WAITING, "trained", "dropped")
REQUESTED = WAITING[0]
TRAINED, DROPPED = STAGES.index("trained"), STAGES.index("dropped")
ENTRIES = 200
"""Entries of the journal between two looks at the clock."""
MOST_SAMPLES = 1 << 26
"""Of a run that has dropped the beginning of its journal: their columns take 4 GB."""
NOTED = ("tokens", "turns", "finish", "score", "oldest_version", "newest_version")


class Names:
    """Texts as small numbers, in order of appearance."""

    def __init__(self, first: Sequence[str] = ()):
        self.texts = list(first)
        self._numbers = {text: number for number, text in enumerate(self.texts)}

    def number(self, text: str) -> int:
        """Of a text; a new one gets the next."""
        made = self._numbers.setdefault(text, len(self.texts))
        if made == len(self.texts):
            self.texts.append(text)
        return made

    def known(self, text: str) -> int:
        """Of a text; -1: it has not appeared."""
        return self._numbers.get(text, -1)

    def numbers(self, texts: Sequence[object], dtype: type = np.int32) -> np.ndarray:
        """(N,) of texts; -1 for None."""
        numbers = {text: -1 if text is None else self.number(str(text)) for text in dict.fromkeys(texts)}
        return np.fromiter(map(numbers.__getitem__, texts), dtype, len(texts))


class Lineage:
    """The journal of a run, read as it grows.

    Args:
        uids, finishes, reasons: shared with the samples' index.

    Attributes:
        columns: name of `KINDS` -> (N,) by the number in the ledger.
        spans: finished stages.
        restarts: steps after which a process of the run went on.
        notice: why it cannot be read to its end; empty.
        version: another number after each change.
    """

    def __init__(self, uids: Names, finishes: Names, reasons: Names):
        self.uids, self.finishes, self.reasons = uids, finishes, reasons
        self.version, self.notice = 0, ""
        self._follower: Follower | None = None
        self._rest: Iterator[Entry] | None = None
        self._seen: tuple[Any, ...] = ()
        self._start_over()

    def _start_over(self) -> None:
        self._data = {name: np.full(1024, np.nan if kind is np.float64 else -1, kind) for name, kind in KINDS.items()}
        self.count, self.last_step = 0, 0
        self.spans: list[Span] = []
        self.restarts: list[int] = []
        self._keys: np.ndarray | None = None
        self._order: np.ndarray | None = None

    @property
    def columns(self) -> dict[str, np.ndarray]:
        return {name: values[: self.count] for name, values in self._data.items()}

    def refresh(self, folder: Path, allowed: Callable[[Path], Path | None], seconds: float = math.inf) -> None:
        """Take in what was written since; a file that cannot be read is a notice.

        Args:
            allowed: the file behind a link; None: the link leads out of the run, and there is no journal.
            seconds: for about as many it reads.
        """
        try:
            if self._rest is None:
                self._look(folder, allowed)
            self._take(time.monotonic() + seconds)
        except (DataError, OSError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            self.notice, self._follower, self._rest = f"the journal is read up to a fault: {error}", None, None

    @property
    def is_complete(self) -> bool:
        """Whether all that was written at the last look is taken in."""
        return self._rest is None

    def _look(self, folder: Path, allowed: Callable[[Path], Path | None]) -> None:
        path = journal_in(folder, "samples")
        places = [] if path is None else list(segments_of(path).values())
        if None in list(map(allowed, places)):  # all of them: each gets its notice
            path, places = None, []
        seen = tuple((place, place.stat().st_size) for place in places)
        if seen == self._seen:
            return
        self._seen, self.version, self.notice = seen, self.version + 1, ""
        if path is None:
            self._start_over()
            return
        if self._follower is None or self._follower.path != path:
            self._follower = Follower(path)
        begins, self._rest = self._follower.fresh()
        if begins:
            self._start_over()

    def _take(self, until: float) -> None:
        while self._rest is not None:
            entries = list(islice(self._rest, ENTRIES))
            if not entries:
                self._rest = None
                return
            self.version += 1
            for entry in entries:
                self._apply(entry)
            if time.monotonic() > until:
                return

    def find(self, uids: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """(N,) number in the ledger of the last attempt at each sample; -1: none."""
        if not self.count:
            return np.full(len(uids), -1, dtype=np.int64)
        if self._keys is None or self._order is None or len(self._keys) != self.count:
            keys = _key(self._data["uid"][: self.count], self._data["sample"][: self.count])
            self._order = np.argsort(keys, kind="stable")
            self._keys = keys[self._order]
        sought = _key(uids, samples)
        places = np.searchsorted(self._keys, sought, side="right") - 1
        is_there = (places >= 0) & (self._keys[np.maximum(places, 0)] == sought)
        return np.where(is_there, self._order[np.maximum(places, 0)], -1)

    def facts(self, number: int) -> JsonObject:
        """All that the ledger has of a sample."""
        made: dict[str, Any] = {name: values[number].item() for name, values in self.columns.items()}
        stage, reason = made.pop("stage"), made.pop("reason")
        texts = {"uid": self.uids.texts, "finish": self.finishes.texts}
        for name, value in made.items():
            made[name] = None if value == -1 or value != value else texts[name][value] if name in texts else value
        made["stage"] = STAGES[stage] if stage >= 0 else None
        if reason >= 0:
            made["reason"] = self.reasons.texts[reason]
            made["meaning"] = REASONS.get(made["reason"], "")
        return {name: value for name, value in made.items() if value is not None}

    def _apply(self, entry: Entry) -> None:
        kind, step = entry["event"], int(entry.get("step", 0))
        if kind == EVENT:
            self.spans.append(span_of(entry, len(self.restarts)))
        elif kind == RUN:
            self._begin(entry, step)
        elif kind == "end":
            self.last_step = step
        elif kind == REQUESTED:
            self._ask(entry, step)
        elif "ids" in entry and kind in STAGES and "t" not in entry:
            self._note(kind, entry, step)

    def _begin(self, entry: Entry, step: int) -> None:
        state = entry.get("state", {}).get("samples")
        if is_resumed(entry):
            self.restarts.append(step)
        if state is None or self.count:
            return
        sampled = int(state["sampled"])
        if not 0 <= sampled <= MOST_SAMPLES:
            raise ValueError(f"{sampled} samples, of which at most {MOST_SAMPLES} are read")
        self._reserve(sampled)
        self.last_step = int(state["last_step"])
        for number, uid, sample, begun, _, row, stage in state["open"]:
            if not 0 <= number < sampled:
                raise ValueError("a sample that was never requested")
            values = {"uid": self.uids.number(str(uid)), "sample": sample, "step": begun,
                      "row": row if isinstance(row, int) else -1, "stage": STAGES.index(stage)}  # fmt: skip
            for name, value in values.items():
                self._data[name][number] = value

    def _ask(self, entry: Entry, step: int) -> None:
        first, each = int(entry["first"]), int(entry.get("each", 1))
        if not 0 <= first <= self.count or not 0 <= len(entry["uid"]) * each <= MOST_ASKED:
            raise ValueError("more samples than a run requests at once, or none that follow those before")
        uids, rows = self.uids.numbers(entry["uid"]), entry.get("row")
        numbers = np.full(len(uids), -1) if rows is None else np.array([r if type(r) is int else -1 for r in rows])
        if "each" in entry:
            samples = np.tile(np.arange(each), len(uids))
            uids, numbers = np.repeat(uids, each), np.repeat(numbers, each)
        else:
            samples = np.array(entry["sample"], dtype=np.int64)
        self._reserve(first + len(uids))
        part = slice(first, first + len(uids))
        for name, values in {"uid": uids, "sample": samples, "row": numbers, "step": step, "stage": 0}.items():
            self._data[name][part] = values
        self._keys = None

    def _note(self, kind: str, entry: Entry, step: int) -> None:
        stretches = [(int(first), int(first) + int(count)) for first, count in entry["ids"]]
        is_known = all(0 <= begin <= end <= self.count for begin, end in stretches)
        if not is_known or sum(end - begin for begin, end in stretches) > self.count:
            raise ValueError("a sample that was never requested, or one twice")
        numbers = np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(*stretch) for stretch in stretches)])
        self._data["stage"][numbers] = STAGES.index(kind)
        if kind == "batch":
            self._data["batch"][numbers] = step
        elif kind in ("trained", "dropped"):
            self._data["settled"][numbers] = step
            if kind == "dropped":
                self._data["reason"][numbers] = self.reasons.number(str(entry["reason"]))
        for name in NOTED:
            if name in entry:
                self._data[name][numbers] = self._values(name, entry[name])

    def _values(self, name: str, value: object) -> np.ndarray:
        values = value if isinstance(value, list) else [value]
        if name == "finish":
            return self.finishes.numbers(values, np.int16)
        missing = np.nan if name == "score" else -1
        return np.array([missing if one is None else one for one in values], dtype=KINDS[name])

    def _reserve(self, count: int) -> None:
        size = len(self._data["uid"])
        if count > size:
            for name, kind in KINDS.items():
                grown = np.full(max(2 * size, count), np.nan if kind is np.float64 else -1, kind)
                grown[: self.count] = self._data[name][: self.count]
                self._data[name] = grown
        self.count = max(self.count, count)


def _key(uids: np.ndarray, samples: np.ndarray) -> np.ndarray:
    return (uids.astype(np.int64) << 31) + samples
