"""The ledger in a run's journal: what became of every sample, one entry per event.

No entry holds a time: two equal runs have equal ledgers. `verl.journal.ledger_reader` answers questions about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import DataError
from verl.journal.account import REASONS, Account, Key, few_names, ranges
from verl.journal.file import Entry, Journal

KEY = "trainer.ledger"
SAYABLE = frozenset((int, str, bool, type(None)))
"""Types whose every value JSON can say."""


class Ledger:
    """What a run writes about its samples, and the account of it.

    Args:
        journal: gets the entries, once it has begun.
    """

    def __init__(self, journal: Journal):
        self._journal, self._lock = journal, journal.lock
        self.start_over()

    def take_in(self, entry: Entry) -> None:
        """An entry that the checkpoint knows."""
        self.account.apply(entry)

    def start_over(self) -> None:
        """Nothing is known."""
        self.account = Account()

    def state(self) -> dict[str, Any]:
        """The account."""
        return {"samples": self.account.state()}

    def resume(self, step: int, waiting: Sequence[Key]) -> None:
        """The journal has begun: only what the checkpoint of a step holds is in flight.

        Args:
            waiting: the samples that it holds.
        """
        if step > 0:
            if self.account.last_step < step:
                self.end(step)
            _, unknown = self.account.ids(waiting)
            if unknown:
                self.requested(step, 0, unknown)
            gone = [(record.uid, record.sample) for record in self.account.missing(waiting)]
            self.dropped(step, "repeated", gone)

    # ---- events ------------------------------------------------------------------------------------------------

    def requested(self, step: int, epoch: int, keys: Sequence[Key], rows: Sequence[Any] | None = None) -> None:
        """Answers are going to be sampled; from here on each has to be trained on, dropped, or waiting.

        Args:
            rows: the row of the data set of each.
        """
        with self._lock:
            entry: dict[str, Any] = {"event": "asked", "step": step, "epoch": epoch, "first": self.account.sampled}
            uids = list(dict.fromkeys(uid for uid, _ in keys))
            each = len(keys) // max(1, len(uids))
            every = slice(None)
            if list(keys) == [(uid, sample) for uid in uids for sample in range(each)]:
                entry, every = {**entry, "each": each, "uid": uids}, slice(None, None, each)
            else:
                entry |= {"uid": [uid for uid, _ in keys], "sample": [sample for _, sample in keys]}
            if rows is not None:
                entry["row"] = [_plain(row) for row in rows[every]]
            self._add(entry)

    def noted(self, event: str, step: int, keys: Sequence[Key], **columns: Sequence[Any]) -> None:
        """Something happened to samples in flight: ``sampled``, ``scored``, ``batch``; a column has one value each."""
        with self._lock:
            self._add(self._entry(event, step, keys, {name: _packed(values) for name, values in columns.items()}))

    def moved(self, step: int, requests: Sequence[tuple[str, int, int]]) -> None:
        """A replica was lost with these requests, or taken back, and another one continues them; once for each time.

        Args:
            requests: uid, sample index, and tokens of the response with which it continues.
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

    def end(self, step: int) -> None:
        """A step is complete and logged."""
        with self._lock:
            self._add({"event": "end", "step": step})

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
            faults.append(f"{len(lost)} samples were lost: {few_names(lost)}")
        settled = account.trained + account.dropped.total() + len(account.open)
        if account.sampled != settled:
            faults.append(f"{account.sampled} samples were requested, and {settled} are accounted for")
        if faults:
            raise DataError(
                f"the account of the samples does not balance: {few_names(faults)}",
                key=KEY,
                got=str(self._journal.path),
                fix=f"python -m verl.journal.ledger_reader {self._journal.path} shows them. The weights are those of "
                "the samples that were trained on.",
            )

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
        self._journal.write(*entries)


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
