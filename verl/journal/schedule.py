"""The schedule in a run's journal: the decisions of an asynchronous run, which a later run can take again.

There is no time in a decision: the clock is the number of decisions before it (``t``). The first entry of the journal
has the settings and the content behind them.

- ``weights``: the samplers have a version.
- ``admit``: groups begin, with the newest version and the identities of their prompts. ``again``: a resumed run samples
  groups again from their prompts.
- ``ended``: groups that training hears of, in this order: how each request was served (replica, version and number of
  tokens of each of its spans, and how it ended), or why the group came to nothing. ``calls``: how often training had
  looked in vain since the decision before. ``answers``: the tokens whose weights no later checkpoint has.
- ``drop``: groups that are discarded as too stale. ``take``: the groups of a chunk.
- ``update``: a digest of the step's samples, their versions, and the norm of the gradient.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import DataError, ReplayError
from verl.journal.file import FORMAT, LIMIT, RUN, Entry, Journal, entries_in, journal_in

if TYPE_CHECKING:
    from verl.protocol import DataProto

KEY, NOT_COMPARED = "trainer.replay_from", ("t", "answers")
_GROUPS: dict[str, type] = {"groups": list}
READ: dict[str, dict[str, type]] = {
    "weights": {"version": int},
    **dict.fromkeys(("admit", "again", "ended"), _GROUPS),
}
"""What a replay reads of a decision without comparing it."""
SHOWN = 300
DROPPED: Entry = {"event": ""}
"""In place of a decision that a journal no longer has."""


Span = tuple[str, int, int]
"""Replica (empty: the tokens were given), version, tokens."""


@dataclass
class Notes:
    """How a request was served: its spans, and how it ended."""

    spans: list[Span]
    finish: str = ""


@dataclass(frozen=True)
class Draws:
    """What a request is to draw.

    Args:
        counts: (version, tokens), in order.
        finish: how it is to end.
        tokens, log_probs: the first tokens, where the weights that drew them are gone: they are taken as they are.
    """

    counts: tuple[tuple[int, int], ...]
    finish: str
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()


class ScheduleRecord:
    """The decisions that a run writes.

    Args:
        journal: gets them, once it has begun.
        script: every decision must be the one that it has; see `Script`.

    Attributes:
        count: decisions so far.
        boundary: the last step whose end a checkpoint may hold.
    """

    def __init__(self, journal: Journal, script: Script | None = None):
        self._journal, self.script, self.boundary = journal, script, journal.step
        self.count = 0
        self._version: int | None = None

    def take_in(self, entry: Entry) -> None:
        """An entry that the checkpoint knows."""
        if "state" in entry:
            self.count, self._version = entry["state"].get("decisions", (self.count, self._version))
        if "t" in entry:
            self.count += 1
            self._version = entry["version"] if entry["event"] == "weights" else self._version

    def start_over(self) -> None:
        """No decision is known; a replay continues where its script is."""
        self.count, self._version = 0 if self.script is None else self.script.at, None

    def state(self) -> dict[str, Any]:
        """The number of decisions, and the version that the samplers have."""
        return {"decisions": [self.count, self._version]}

    def add(self, event: str, **facts: Any) -> None:
        """A decision was taken.

        Raises:
            ReplayError: the recorded run took another one.
        """
        with self._journal.lock:  # which is held while the journal notes the count for a new segment
            entry = {"event": event, "t": self.count, **facts}
            if self.script is not None:
                self.script.check(entry)
            self._journal.write(entry)
            self.count += 1

    def weights(self, version: int) -> None:
        """The samplers have a version; only once where a resumed run publishes it again."""
        if version != self._version:
            self.add("weights", version=version)
            self._version = version


class Script:
    """The schedule that a replay follows.

    Args:
        path: of the file.
        about: of the run that wrote it.
        decisions: all of them; in place of those that the journal has dropped, entries that are none.

    Attributes:
        at: the next decision.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], decisions: Sequence[Entry]):
        self.path, self.about, self.decisions, self.at = path, about, decisions, 0
        self._ends: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}
        for number, entry in enumerate(decisions):
            for group in _ended(entry):
                self._ends.setdefault(group["group"], []).append((number, group))

    @classmethod
    def read(cls, place: Path) -> Script:
        """Of a run's folder, where the run that wrote last is meant, or of the file itself.

        Raises:
            DataError: there is none, or it cannot be followed.
        """
        path = journal_in(place, "decisions")
        fix = "Only runs under an asynchronous trainer.v1.trainer_mode record their decisions."
        if path is None:
            raise DataError("there is no recorded schedule", key=KEY, got=str(place), fix=fix)
        entries = entries_in(path)
        about = next(entries, DROPPED)
        if about["event"] != RUN or "settings" not in about:
            raise DataError("the record does not begin with a run's settings", key=KEY, got=str(path), fix=fix)
        if type(about.get("format")) is not int:
            raise DataError("a record of another format", key=KEY, got=about.get("format"), allowed=[FORMAT])
        decisions = [DROPPED] * about.get("state", {}).get("decisions", [0])[0]
        for number, entry in enumerate(entries, start=2):
            try:
                if "t" in entry:
                    decisions.append(_checked(entry, path))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                fix = "Copy the record again from where the run wrote it."
                message = f"entry {number} of the record is damaged: it is no decision of the kind {entry['event']!r}"
                raise DataError(message, key=KEY, got=str(path), fix=fix) from error
        return cls(path, about, decisions)

    @property
    def is_over(self) -> bool:
        return self.at >= len(self.decisions)

    @property
    def next(self) -> Entry:
        """The next decision; an empty one at the end."""
        return {"event": ""} if self.is_over else self.decisions[self.at]

    def begin(self, count: int) -> None:
        """Continue after ``count`` decisions, which a checkpoint knows.

        Raises:
            ReplayError: there are fewer, or the next ones are no longer in the journal.
        """
        if self.decisions[count : count + 1] == [DROPPED]:
            message = f"the journal speaks of the steps after {self.about['step']}: the decisions before were dropped"
            fix = f"Record a run with a higher {LIMIT}, or resume from a checkpoint of a later step."
            raise ReplayError(message, key=KEY, got=str(self.path), fix=fix)
        if count > len(self.decisions):
            raise ReplayError(f"the checkpoint is {count} decisions into its run, and the record has only "
                              f"{len(self.decisions)}", key=KEY, got=str(self.path))  # fmt: skip
        self.at = count

    def end_of(self, group: int) -> Mapping[str, Any] | None:
        """What becomes of a group next (one that failed begins again); None where the record ends before."""
        return next((end for number, end in self._ends.get(group, ()) if number >= self.at), None)

    def ending_before_weights(self) -> int:
        """Groups that end before the next weights arrive."""
        number = 0
        for entry in self.decisions[self.at :]:
            if entry["event"] == "weights":
                return number
            number += len(_ended(entry))
        return number

    def check(self, entry: Entry) -> None:
        """Move on by a decision; after the end there is nothing to compare with.

        Raises:
            ReplayError: it is not the recorded one.
        """
        if self.is_over:
            return
        recorded = self.next
        if _decision(recorded) != _decision(json.loads(json.dumps(entry))):
            raise self.differs(entry)
        self.at += 1

    def differs(self, entry: Entry) -> ReplayError:
        """The error that the next decision is another one."""
        recorded = self.next
        was, now = _difference(_decision(recorded), _decision(json.loads(json.dumps(entry))))
        return ReplayError(
            f"decision {self.at} differs from the recorded run, the first one that does. It was: {was}; it is: {now}",
            key=KEY,
            got=str(self.path),
            fix="Same code, same libraries and the same kind of machine? docs/howto/replay.md: what a replay needs.",
        )


def digest(rows: Iterable[Sequence[Any]]) -> str:
    """A short name of values, equal for equal ones."""
    total, encoder = hashlib.blake2b(digest_size=12), json.JSONEncoder(separators=(",", ":"))
    for row in rows:
        total.update(encoder.encode(list(row)).encode() + b"\n")
    return total.hexdigest()


def finite(value: float | None) -> float | None:
    """What JSON can say of a number."""
    return value if value is not None and math.isfinite(value) else None


def counts_of(request: Mapping[str, Any]) -> list[list[int]]:
    """[version, tokens] of a request in the record, whichever replica drew them."""
    counts: list[list[int]] = []
    for _, version, tokens in request["spans"]:
        if counts and counts[-1][0] == version:
            counts[-1][1] += tokens
        else:
            counts.append([version, tokens])
    return counts


def end_entry(
    number: int, why: str, served: Mapping[str, Notes], samples: Callable[[], DataProto], boundary: int
) -> Entry:
    """What the record says of a group that ended.

    Args:
        served: each of its requests.
        samples: its rows, where their tokens are noted: a run that is resumed at ``boundary`` cannot draw those of
            earlier versions, as their weights are gone.
    """
    requests = {
        name: {"spans": [list(span) for span in notes.spans], "finish": notes.finish} for name, notes in served.items()
    }
    drawn_before = {
        name: sum(count for version, count in counts_of(request) if version < boundary)
        for name, request in requests.items()
    }
    entry: Entry = {"group": number, "why": why, "requests": requests}
    if not any(drawn_before.values()):  # also of a group that failed, which has no tensors
        return entry
    answers = _answers(samples(), requests, drawn_before)
    return {**entry, "answers": answers} if answers else entry


def _answers(samples: DataProto, requests: Mapping[str, Any], drawn_before: Mapping[str, int]) -> dict[str, Any]:
    """The first tokens of requests, as many as ``drawn_before`` says.

    A row has the tokens of its requests one after the other, between what was inserted (version -1). In which order the
    trajectories of a sample have them, where it has several, is not known: a replay says that they are missing.
    """
    from verl.protocol.fields import BEFORE  # it imports torch, which a reader of a journal need not have

    tensors = samples.tensors
    if "token_versions" not in tensors.keys():
        return {}
    columns, answers = samples.non_tensor_batch, dict[str, Any]()
    drawn = tensors["token_versions"] >= 0
    has_log_probs = "rollout_log_probs" in tensors.keys()
    several = columns.get(BEFORE, [None] * len(drawn))
    for row, (uid, index) in enumerate(zip(columns["uid"], columns["sample_index"], strict=True)):
        if several[row] is not None:
            continue
        tokens = tensors["responses"][row][drawn[row]].tolist()
        log_probs = tensors["rollout_log_probs"][row][drawn[row]].tolist() if has_log_probs else []
        start = 0
        for turn in range(len(requests)):
            name = f"{uid}-{index}-{turn}"
            if name not in requests:
                break
            length = sum(count for _, count in counts_of(requests[name]))
            part = slice(start, start + drawn_before[name])
            if drawn_before[name] and start + length <= len(tokens):
                answers[name] = {"tokens": tokens[part], "log_probs": log_probs[part]}
            start += length
    return answers


def recorded_draws(end: Mapping[str, Any], gone: int) -> dict[str, Draws]:
    """What the requests of a group that `end_entry` noted are to draw again.

    Args:
        gone: tokens of versions before it are taken from the record.

    Raises:
        ReplayError: the record lacks some of these.
    """
    spans, answers = {}, end.get("answers", {})
    for name, request in end["requests"].items():
        # A request that went on elsewhere with the same version had its prefix computed at once: its draws part there.
        counts = tuple((version, count) for _, version, count in request["spans"])
        number = sum(count for version, count in counts if version < gone)
        answer = answers.get(name, {"tokens": (), "log_probs": ()})
        if len(answer["tokens"]) < number:
            raise ReplayError(f"the record lacks {number} tokens of request {name}, drawn before step {gone}", key=KEY)
        tokens, log_probs = (tuple(answer[part][:number]) for part in ("tokens", "log_probs"))
        spans[name] = Draws(counts, request["finish"], tokens, log_probs)
    return spans


def _ended(entry: Entry) -> Sequence[Mapping[str, Any]]:
    return entry["groups"] if entry["event"] == "ended" else ()


def _decision(entry: Entry) -> Entry:
    """What must be equal in a replay: everything but the replicas, and what a resume would need."""
    decision = {name: value for name, value in entry.items() if name not in NOT_COMPARED}
    if entry["event"] == "ended":
        decision["groups"] = [
            {"group": group["group"], "why": group["why"],
             "requests": {name: [counts_of(its), its["finish"]] for name, its in sorted(group["requests"].items())}}
            for group in entry["groups"]
        ]  # fmt: skip
    return decision


def _difference(was: Entry, now: Entry) -> tuple[str, str]:
    """The two decisions, of the same kind only where they differ."""
    if was["event"] == now["event"]:
        names = [name for name in {**was, **now} if name == "event" or was.get(name) != now.get(name)]
        was, now = ({name: decision.get(name) for name in names} for decision in (was, now))
    return _shown(was), _shown(now)


def _shown(entry: Entry) -> str:
    text = " ".join([str(entry["event"]) or "its end", *(f"{k}={v}" for k, v in entry.items() if k != "event")])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _checked(entry: Entry, path: Path) -> Entry:
    """The decision, in which all is there that a replay reads; raises as reading it would, or as `_check_order`."""
    if entry["event"] == "trained":  # its name in an earlier release
        entry = {**entry, "event": "update"}
    if any(type(entry[name]) is not kind for name, kind in READ.get(entry["event"], {}).items()):
        raise TypeError
    _decision(entry)
    for end in _ended(entry):
        if type(end["group"]) is not int:
            raise TypeError
        _check_order(end, path)
    return entry


def _check_order(end: Mapping[str, Any], path: Path) -> None:
    """No conversation goes back to older weights: nobody has both at once.

    Raises:
        DataError: one does; a replica was lost meanwhile.
    """
    newest: dict[str, int] = {}
    for name, request in sorted(end["requests"].items(), key=lambda item: int(item[0].rpartition("-")[2])):
        sample = name.rpartition("-")[0]
        for version, _ in counts_of(request):
            if version < newest.get(sample, version):
                raise DataError(f"request {name} went on with older weights, at another replica: no replay can do that",
                    key=KEY, got=str(path))  # fmt: skip
            newest[sample] = version
