"""Questions about the samples of a run: ``python -m verl.journal.ledger_reader RUN [--step N] [--uid U] [--dropped]``.

Without a question it shows the account: how many samples were trained on, dropped for which reason, and still wait.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError, print_answer, printable, suggest
from verl.journal.account import REASONS, Account, Key, SampleRecord, numbers_in
from verl.journal.file import NAME, DamagedJournal, Entry, entries_in, journal_in

COLUMNS = ("uid", "sample", "row", "attempt", "asked in", "turns", "tokens", "end", "versions", "kept", "score",
           "batch of")  # fmt: skip
SHOWN = 40
WAITING = ("asked", "moved", "sampled", "scored", "batch")


Choice = Callable[[SampleRecord], bool]


class History(Account):
    """The samples of a run with what is known of each; memory is taken by those in flight and those that are kept.

    Args:
        keeps: which samples are kept once it is known what became of them; None: all.

    Attributes:
        steps: first and last one that has a batch.
    """

    def __init__(self, keeps: Choice | None = None) -> None:
        super().__init__()
        self.steps: tuple[int, int] | None = None
        self._keeps, self._settled = keeps, list[SampleRecord]()
        self._attempts: Counter[Key] = Counter()
        """Of keys that may come again: what was trained on does not."""

    @classmethod
    def of(cls, path: Path, keeps: Choice | None = None) -> History:
        """The history in a ledger; raises as `fill`."""
        made = cls(keeps)
        fill(made, path)
        return made

    @property
    def samples(self) -> list[SampleRecord]:
        """Those that are kept, and of those in flight the ones like them, in request order."""
        in_flight = (record for record in self.open.values() if self._keeps is None or self._keeps(record))
        return sorted([*self._settled, *in_flight], key=lambda record: record.id)

    def fate(self, record: SampleRecord) -> str:
        """What became of a sample, in a sentence."""
        facts = record.facts
        if record.stage == "trained":
            return f"trained in step {facts['settled']}, which made version {facts['version']}"
        if record.stage == "dropped":
            why = f"dropped in step {facts['settled']}: {facts['reason']}, {REASONS.get(facts['reason'], '?')}"
            return f"{why} ({facts['error']})" if facts.get("error") else why
        return {
            "asked": "being sampled",
            "moved": "being sampled, by another replica",
            "batch": f"in the batch of step {facts.get('batch')}, in work",
        }.get(record.stage, "waits for a batch")

    def _ask(self, entry: Entry, step: int) -> None:
        before = set(self.open)
        super()._ask(entry, step)
        for number in sorted(self.open.keys() - before):
            record = self.open[number]
            self._attempts[record.uid, record.sample] += 1
            record.facts["attempt"] = self._attempts[record.uid, record.sample]

    def _note(self, kind: str, entry: Entry, step: int) -> None:
        super()._note(kind, entry, step)
        if kind == "batch":
            first, last = self.steps or (step, step)
            self.steps = min(first, step), max(last, step)
        columns = {name: value for name, value in entry.items() if name not in ("event", "step", "ids", "unknown")}
        for place, number in enumerate(numbers_in(entry["ids"])):
            facts = self.open[number].facts
            facts[kind] = step
            for name, value in columns.items():
                facts[name] = value[place] if isinstance(value, list) else value

    def _settle(self, kind: str, entry: Entry, step: int) -> None:
        ended = [self.open[number] for number in numbers_in(entry["ids"])]
        super()._settle(kind, entry, step)
        for record in ended:
            record.facts["settled"] = step
            record.facts |= {name: entry[name] for name in ("reason", "version") if name in entry}
            if kind == "trained":
                del self._attempts[record.uid, record.sample]
            if self._keeps is None or self._keeps(record):
                self._settled.append(record)


def fill(account: Account, path: Path) -> None:
    """Take in all entries of a journal that hold.

    Raises:
        DamagedJournal: it is damaged.
    """
    for number, entry in enumerate(entries_in(path), start=1):
        try:
            account.apply(entry)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DamagedJournal(f"entry {number} does not follow from those before it", got=str(path)) from error


def ledger_in(place: Path) -> Path:
    """The journal that a path names: the file, or the newest one in a run's folder.

    Raises:
        DataError: there is none.
    """
    path = journal_in(place, "samples")
    if path is None:
        raise DataError("there is no journal", got=str(place), fix=f"trainer.ledger=true writes {NAME} into "
                        "trainer.default_local_dir.")  # fmt: skip
    return path


def account_table(history: Account) -> str:
    """How many samples came to which end."""
    stages = [record.stage for record in history.open.values()]
    rows = [("sampled", history.sampled, ""), ("trained on", history.trained, "")]
    rows += [
        (f"dropped: {reason}", count, REASONS.get(reason, "")) for reason, count in sorted(history.dropped.items())
    ]
    rows += [(f"waiting: {stage}", stages.count(stage), "") for stage in WAITING if stage in stages]
    lines = table(("account", "samples", "meaning"), rows)
    faults = (f"fault: {one_line(fault)}" for fault in history.faults)
    return "\n".join([lines, f"last complete step: {history.last_step}", *faults])


def samples_table(history: History, samples: Sequence[SampleRecord], limit: int) -> str:
    """A row per sample."""
    rows = [(*_cells(record), history.fate(record)) for record in samples[:limit]]
    shown = table((*COLUMNS, "what became of it"), rows)
    more = len(samples) - limit
    return f"{shown}\n{more} more: --limit shows them" if more > 0 else f"{shown}\n{len(samples)} samples"


def _cells(entry: SampleRecord) -> tuple[Any, ...]:
    facts = entry.facts
    oldest, newest = facts.get("oldest_version"), facts.get("newest_version")
    versions = newest if oldest == newest else f"{oldest}-{newest}"
    score = facts.get("score")
    return (
        entry.uid, entry.sample, entry.row, facts.get("attempt"), entry.step, facts.get("turns"), facts.get("tokens"),
        facts.get("finish"), versions, facts.get("kept"), None if score is None else f"{score:g}", facts.get("batch"),
    )  # fmt: skip


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Aligned columns; nothing is cut off."""
    cells = [["" if value is None else one_line(value) for value in row] for row in [names, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def one_line(value: object) -> str:
    """What a row or a loop said, as a terminal may be shown it within a line."""
    return printable(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def asked_for(step: int | None, uid: str | None, dropped: str | None) -> Choice:
    """The samples that a question is about: those of a step's batch, of a prompt, dropped for a reason (any: "")."""

    def is_meant(record: SampleRecord) -> bool:
        is_dropped = record.stage == "dropped" and dropped in ("", record.facts["reason"])
        return (
            (step is None or record.facts.get("batch") == step)
            and (uid is None or record.uid == uid)
            and (dropped is None or is_dropped)
        )

    return is_meant


def ledger_answer(place: Path, step: int | None, uid: str | None, dropped: str | None, limit: int) -> str:
    """The answer as text.

    Raises:
        DataError: no such ledger, step, prompt or reason.
    """
    if dropped and dropped not in REASONS:
        raise DataError("no such reason", key="--dropped", got=dropped, fix=suggest(dropped, REASONS))
    path = ledger_in(place)
    if step is None and uid is None and dropped is None:
        account = Account()  # holds the open samples alone, where a history holds all
        fill(account, path)
        return account_table(account)
    history = History.of(path, asked_for(step, uid, dropped))
    samples = history.samples
    if not samples and uid is not None:
        uids = {str(name) for entry in entries_in(path) if entry["event"] == "asked" for name in entry["uid"]}
        if uid not in uids:
            raise DataError("the ledger knows no such prompt", key="--uid", got=uid, fix=suggest(uid, sorted(uids)))
    if not samples and step is not None:
        known_steps = f"{history.steps[0]} to {history.steps[1]}" if history.steps else "none"
        raise DataError("no batch of this step is in the ledger", key="--step", got=step, allowed=known_steps)
    return samples_table(history, samples, limit)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (trainer.default_local_dir), or its journal")
    parser.add_argument("--step", type=int, default=None, help="what this step trained on, and what it left out")
    parser.add_argument("--uid", default=None, help="where this prompt's samples are, or what became of them")
    parser.add_argument(
        "--dropped", nargs="?", const="", default=None, metavar="REASON", help="what was dropped, and why"
    )
    parser.add_argument("--limit", type=int, default=SHOWN, help=f"samples that are shown; {SHOWN} by default")
    args = parser.parse_args(argv)
    return print_answer(lambda: ledger_answer(args.run, args.step, args.uid, args.dropped, args.limit))


if __name__ == "__main__":
    sys.exit(main())
