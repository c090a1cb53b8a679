"""Questions about a run's ledger: ``python -m verl.observability.ledger_reader RUN [--step N] [--uid U] [--dropped]``.

Without a question it shows the account: how many samples were trained on, dropped for which reason, and still wait.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.errors import DataError, VerlError, printable, suggest
from verl.observability.account import REASONS, Account, Entry, SampleRecord, numbers_in
from verl.observability.ledger import NAME, lines_of

COLUMNS = ("uid", "sample", "row", "attempt", "asked in", "turns", "tokens", "end", "versions", "score", "batch of")
SHOWN = 40
WAITING = ("asked", "sampled", "scored", "batch")


class History(Account):
    """All samples of a run with what is known of each, in the order in which they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[SampleRecord] = []
        self._attempts: dict[tuple[str, int], int] = {}

    @classmethod
    def of(cls, path: Path) -> History:
        """The history in a ledger; raises as `fill`."""
        made = cls()
        fill(made, path)
        return made

    def fate(self, one: SampleRecord) -> str:
        """What became of a sample, in a sentence."""
        facts = one.facts
        if one.stage == "trained":
            return f"trained in step {facts['settled']}, which made version {facts['version']}"
        if one.stage == "dropped":
            why = f"dropped in step {facts['settled']}: {facts['reason']}, {REASONS.get(facts['reason'], '?')}"
            return f"{why} ({facts['error']})" if facts.get("error") else why
        return {"asked": "being sampled", "batch": f"in the batch of step {facts.get('batch')}, in work"}.get(
            one.stage, "waits for a batch"
        )

    def _ask(self, entry: Entry, step: int) -> None:
        before = set(self.open)
        super()._ask(entry, step)
        for number in sorted(self.open.keys() - before):
            one = self.open[number]
            attempt = self._attempts[one.uid, one.sample] = self._attempts.get((one.uid, one.sample), 0) + 1
            one.facts["attempt"] = attempt
            self.samples.append(one)

    def _note(self, kind: str, entry: Entry, step: int) -> None:
        super()._note(kind, entry, step)
        columns = {name: value for name, value in entry.items() if name not in ("event", "step", "ids", "unknown")}
        for place, number in enumerate(numbers_in(entry["ids"])):
            facts = self.open[number].facts
            facts[kind] = step
            for name, value in columns.items():
                facts[name] = value[place] if isinstance(value, list) else value

    def _settle(self, kind: str, entry: Entry, step: int) -> None:
        for number in numbers_in(entry["ids"]):
            facts = self.open[number].facts
            facts["settled"] = step
            facts |= {name: entry[name] for name in ("reason", "version") if name in entry}
        super()._settle(kind, entry, step)


def fill(account: Account, path: Path) -> None:
    """Take in all entries of a ledger.

    Raises:
        DataError: it is damaged.
    """
    for number, entry in enumerate(lines_of(path), start=1):
        try:
            account.apply(entry)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"line {number} does not follow from those before it", got=str(path)) from error


def ledger_in(place: Path) -> Path:
    """The ledger that a path names: the file, or the newest one in a run's folder.

    Raises:
        DataError: there is none.
    """
    if place.is_file():
        return place
    made = [p for p in place.glob("ledger*.jsonl") if ".replaced" not in p.name]
    if not made:
        raise DataError("there is no ledger", got=str(place), fix=f"trainer.ledger=true writes {NAME} into "
                        "trainer.default_local_dir.")  # fmt: skip
    return max(made, key=lambda path: (path.stat().st_mtime_ns, path.name))


def account_table(history: Account) -> str:
    """How many samples came to which end."""
    stages = [one.stage for one in history.open.values()]
    rows = [("sampled", history.sampled, ""), ("trained on", history.trained, "")]
    rows += [
        (f"dropped: {reason}", count, REASONS.get(reason, "")) for reason, count in sorted(history.dropped.items())
    ]
    rows += [(f"waiting: {stage}", stages.count(stage), "") for stage in WAITING if stage in stages]
    lines = table(("account", "samples", "meaning"), rows)
    faults = (f"fault: {one_line(one)}" for one in history.faults)
    return "\n".join([lines, f"last complete step: {history.last_step}", *faults])


def samples_table(history: History, samples: Sequence[SampleRecord], limit: int) -> str:
    """A row per sample."""
    rows = [(*_cells(one), history.fate(one)) for one in samples[:limit]]
    shown = table((*COLUMNS, "what became of it"), rows)
    more = len(samples) - limit
    return f"{shown}\n{more} more: --limit shows them" if more > 0 else f"{shown}\n{len(samples)} samples"


def _cells(one: SampleRecord) -> tuple[Any, ...]:
    facts = one.facts
    oldest, newest = facts.get("oldest_version"), facts.get("newest_version")
    versions = newest if oldest == newest else f"{oldest}-{newest}"
    score = facts.get("score")
    return (
        one.uid, one.sample, one.row, facts["attempt"], one.step, facts.get("turns"), facts.get("tokens"),
        facts.get("finish"), versions, None if score is None else f"{score:g}", facts.get("batch"),
    )  # fmt: skip


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Aligned columns; nothing is cut off."""
    cells = [["" if value is None else one_line(value) for value in row] for row in [names, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def one_line(value: Any) -> str:
    """What a row or a loop said, as a terminal may be shown it within a line."""
    return printable(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def chosen(history: History, step: int | None, uid: str | None, dropped: str | None) -> Iterator[SampleRecord]:
    """The samples that a question is about: those of a step's batch, of a prompt, dropped for a reason (any: "")."""
    for one in history.samples:
        facts = one.facts
        if step is not None and facts.get("batch") != step:
            continue
        if uid is not None and one.uid != uid:
            continue
        if dropped is not None and (one.stage != "dropped" or dropped not in ("", facts["reason"])):
            continue
        yield one


def answer(place: Path, step: int | None, uid: str | None, dropped: str | None, limit: int) -> str:
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
    history = History.of(path)
    samples = list(chosen(history, step, uid, dropped))
    if not samples and uid is not None:
        known = sorted({one.uid for one in history.samples})
        raise DataError("the ledger knows no such prompt", key="--uid", got=uid, fix=suggest(uid, known))
    if not samples and step is not None:
        steps = sorted({one.facts["batch"] for one in history.samples if "batch" in one.facts})
        known_steps = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise DataError("no batch of this step is in the ledger", key="--step", got=step, allowed=known_steps)
    return samples_table(history, samples, limit)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder (trainer.default_local_dir), or its ledger")
    parser.add_argument("--step", type=int, default=None, help="what this step trained on, and what it left out")
    parser.add_argument("--uid", default=None, help="where this prompt's samples are, or what became of them")
    parser.add_argument(
        "--dropped", nargs="?", const="", default=None, metavar="REASON", help="what was dropped, and why"
    )
    parser.add_argument("--limit", type=int, default=SHOWN, help=f"samples that are shown; {SHOWN} by default")
    args = parser.parse_args(argv)
    try:
        print(answer(args.run, args.step, args.uid, args.dropped, args.limit))
    except VerlError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
