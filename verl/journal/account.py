"""What became of every sample of a run: each is sampled, then trained on, dropped for a named reason, or still waiting.

The entries of a journal are applied one after the other, by the run that writes them and by those who read the file.
Only samples in flight are held: a run of any length needs the memory of its open ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.journal.file import RUN, Entry

MOST_ASKED = 1 << 20
"""Samples that one entry may ask for: a damaged one must not take the memory of its reader."""
Key = tuple[str, int]
"""A prompt's uid and the number of the answer among those to it."""

REASONS = {
    "filtered_group": "all answers to its prompt came out the same (algorithm.filter_groups)",
    "surplus": "more prompts were sampled than are trained on (data.oversample_factor)",
    "unscorable": "it could not be scored, so it was masked",
    "given_up": "enough others of its batch were done (actor_rollout_ref.rollout.over_sample_rate), so it was masked",
    "failed_loop": "its agent loop failed, so it was masked",
    "rejected": "rollout correction rejected all of its tokens",
    "not_drawn": "PF-PPO drew other rows of the batch",
    "not_paired": "it is neither the best nor the worst answer to its prompt, or these two are equal",
    "warm_up": "no model was updated in its step (trainer.critic_warmup)",
    "stale": "its weights were older than the schedule's bound when it was to be trained on",
    "unfinished": "the run ended while it was sampled",
    "repeated": "the run went on from a checkpoint that did not hold it; its prompt was sampled again",
}
"""Why a sample is not trained on."""
NOT_OF_SAMPLES = (RUN, "span")
"""Events besides the decisions, which have a place ``t`` in their order."""
NAMED = 8
"""Samples that a message names."""


@dataclass(slots=True)
class SampleRecord:
    """One attempt at one answer.

    Args:
        id: its number in the ledger.
        step: the one it was sampled for.
        row: of the data set, where that is known.
        stage: what happened to it last.
    """

    id: int
    uid: str
    sample: int
    step: int
    epoch: int = 0
    row: Any = None
    stage: str = "asked"
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.uid}#{self.sample} (of step {self.step}, {self.stage})"


class Account:
    """Counts of a run's samples, and those in flight.

    Attributes:
        sampled, trained, dropped: numbers; dropped by reason.
        open: the samples in flight by number.
        faults: sentences about entries that contradict others.
    """

    def __init__(self) -> None:
        self.sampled = self.trained = self.last_step = 0
        self.dropped: Counter[str] = Counter()
        self.open: dict[int, SampleRecord] = {}
        self.faults: list[str] = []
        self._ids: dict[Key, list[int]] = {}

    def apply(self, entry: Entry) -> None:
        """Take in one entry; those that say nothing of samples change nothing.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        kind, step = entry["event"], int(entry.get("step", 0))
        if kind == RUN and not self.sampled and "samples" in entry.get("state", ()):
            self._restore(entry["state"]["samples"])
        if kind in NOT_OF_SAMPLES or "t" in entry:
            return
        if kind == "asked":
            self._ask(entry, step)
        elif kind in ("trained", "dropped"):
            self._settle(kind, entry, step)
        elif kind == "end":
            self.last_step = step
        else:
            self._note(kind, entry, step)
        for uid, sample in entry.get("unknown", ()):
            self.faults.append(f"{uid}#{sample} was {kind} in step {step}, and was not in flight then")

    def state(self) -> dict[str, Any]:
        """All of it, for an entry ``run`` whose journal may lose what is before it."""
        counts = {"sampled": self.sampled, "trained": self.trained, "last_step": self.last_step, "faults": self.faults}
        open_ones = [[r.id, r.uid, r.sample, r.step, r.epoch, r.row, r.stage] for r in self.open.values()]
        return {**counts, "dropped": self.dropped, "open": open_ones}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.sampled, self.trained, self.last_step = (int(state[name]) for name in ("sampled", "trained", "last_step"))
        self.faults, self.dropped = list(state["faults"]), Counter(state["dropped"])
        for values in state["open"]:
            self._begin(SampleRecord(*values))

    def ids(self, keys: Iterable[Key]) -> tuple[list[int], list[Key]]:
        """Numbers of samples in flight, and the keys that are none; the same key twice gives two attempts at it."""
        ids: list[int] = []
        unknown: list[Key] = []
        times: dict[Key, int] = {}
        for key in keys:
            waiting, before = self._ids.get(key, ()), times.get(key, 0)
            times[key] = before + 1
            if before < len(waiting):
                ids.append(waiting[before])
            else:
                unknown.append(key)
        return ids, unknown

    def missing(self, waiting: Iterable[Key]) -> list[SampleRecord]:
        """Samples in flight that are not among those that wait: they were lost."""
        held = set(self.ids(waiting)[0])
        return [record for number, record in self.open.items() if number not in held]

    def _ask(self, entry: Entry, step: int) -> None:
        first, epoch, rows = int(entry["first"]), int(entry.get("epoch", 0)), entry.get("row")
        if not 0 <= len(entry["uid"]) * entry.get("each", 1) <= MOST_ASKED:
            raise ValueError("more samples than a run asks for at once")
        for number, (uid, sample) in enumerate(keys_in(entry)):
            place = number // entry["each"] if "each" in entry else number
            self._begin(SampleRecord(first + number, uid, sample, step, epoch, None if rows is None else rows[place]))
            self.sampled += 1

    def _begin(self, record: SampleRecord) -> None:
        self.open[record.id] = record
        self._ids.setdefault((record.uid, record.sample), []).append(record.id)

    def _note(self, kind: str, entry: Entry, step: int) -> None:
        for number in numbers_in(entry["ids"]):
            self.open[number].stage = kind

    def _settle(self, kind: str, entry: Entry, step: int) -> None:
        for number in numbers_in(entry["ids"]):
            record = self.open.pop(number)
            record.stage = kind
            same = self._ids[record.uid, record.sample]
            same.remove(number)
            if not same:
                del self._ids[record.uid, record.sample]
            if kind == "trained":
                self.trained += 1
            else:
                self.dropped[str(entry["reason"])] += 1


def keys_in(entry: Entry) -> Iterator[Key]:
    """The requested samples: ``uid`` of every prompt and the number of answers to ``each``, or both of every row."""
    if "each" in entry:
        return ((str(uid), sample) for uid in entry["uid"] for sample in range(entry["each"]))
    return ((str(uid), int(sample)) for uid, sample in zip(entry["uid"], entry["sample"], strict=True))


def ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers in their order as [first, how many] of those that follow each other."""
    made: list[list[int]] = []
    for number in numbers:
        if made and made[-1][0] + made[-1][1] == number:
            made[-1][1] += 1
        else:
            made.append([number, 1])
    return made


def numbers_in(made: Iterable[Sequence[int]]) -> Iterator[int]:
    """The numbers behind `ranges`."""
    return (number for first, count in made for number in range(first, first + count))


def few_names(samples: Sequence[object]) -> str:
    """A few of them for a message, and how many more there are."""
    more = len(samples) - NAMED
    return ", ".join(str(record) for record in samples[:NAMED]) + (f" and {more} more" if more > 0 else "")
