"""When groups are admitted to sampling, which bounds how stale a trained token is: by construction, and asserted.

The bound
---------
A group is all n samples of one prompt. Weights are published after every training step; a step trains on T groups
(k chunks of B groups, T = k B), and the weights that step s begins with are version s, counted from 0. Let f be the
share of a step that may be sampled ahead, ``ahead``. Of the groups that were admitted and neither trained on nor lost,
let a be the number, and c the number of groups that were trained on. The next group gets the ordinal g = c + a. It is
admitted under the newest version v if and only if

    g < T (v + 1 + f)

- In order of admission, group g is used by step floor(g / T) or an earlier one (a group before it may be lost, and none
  overtakes it). Its staleness, the versions between sampling and use, is at most floor(g / T) - v <= ceil(f), or 0
  where f T < 1, and no later sampling of its tokens makes it larger. The group size n, the chunk B and the number of
  requests in flight are not in the formula: they say how fast the queue fills, not how far. At most T (1 + f) groups
  are in the queue or in flight at once, and for f <= 1 at most f T of a step's groups are of an older version.
- In order of completion, later groups overtake. Each group then has a last step, v + S, where S >= ceil(f) is the
  bound. ``wait`` takes a chunk only if every group that is left can still be used in time: for every step d, the groups
  with a last step of d or earlier that stay behind must fit into the chunks that are left until then. Admission gives
  this for a new group, since g < T (v + 1 + S), and taking keeps it. ``drop`` takes whatever is complete, and discards
  groups whose last step has passed. ``reweight`` trains on those, too: the one case without a bound, for runs that
  correct for it.

By batch
--------
Where the step itself waits for its samples, prompts are admitted in batches of the loader (``by_batch``) until T groups
are complete, whatever f says. What is complete beyond T waits for the next step, in order of completion, and is a
version staler with each step that it waits. Only ``drop`` holds it to S. The synchronous schedule has no such limit.

With a choice
-------------
A step may train on a part of its groups (``trained_on``, `verl.trainer.ppo.group_filter`). T and B then count the
candidates, all of which are taken. The choice changes no ordinal and no version, so the bound is the same.

`GroupQueue` keeps the books: no thread, no clock, no tensor. What it holds of a prompt and its samples is the caller's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from verl.errors import VerlError

OVERDUE = ("wait", "drop", "reweight")
"""What happens to a group that would be staler than the bound."""


class BoundBroken(VerlError):
    """A token is staler than the bound: a fault of the program, never of a setting."""


@dataclass(frozen=True)
class GroupAdmission:
    """How far sampling may be ahead of training; the module says why it holds.

    Args:
        groups: T, of one training step, after which weights are published.
        chunk: B, taken and trained on at once; divides ``groups``.
        ahead: f >= 0, share of a step that may be sampled before its weights are there.
        staleness: S, versions, in order of completion; None: the smallest there is.
        in_order: groups are used in order of admission; else in order of completion.
        overdue: one of `OVERDUE`; in order of admission there is nothing to decide.
        by_batch: prompts are admitted in batches until a step's groups are complete.
        in_work: by batch, the groups that are sampled together; those that are not complete when enough others are
            stay in work. None: every group ends with its batch.
        trained_on: of the groups of a chunk, those that are; the others are dropped. None: all.

    Example:
        >>> bound = GroupAdmission(groups=64, chunk=16, ahead=Fraction("0.5"))
        >>> bound.limit(version=0), bound.allowed
        (96, 1)
    """

    groups: int
    chunk: int
    ahead: Fraction = Fraction(0)
    staleness: int | None = None
    in_order: bool = True
    overdue: str = "wait"
    by_batch: bool = False
    in_work: int | None = None
    trained_on: int | None = None

    def __post_init__(self) -> None:
        assert self.groups > 0 < self.chunk and self.groups % self.chunk == 0, "a step is a number of chunks"
        assert self.ahead >= 0 and self.overdue in OVERDUE
        assert self.allowed * self.groups >= self._ahead, "sampling may not be further ahead than the bound"

    @cached_property
    def _ahead(self) -> int:
        return math.floor(self.groups * self.ahead)

    @cached_property
    def allowed(self) -> int:
        """S, the largest staleness of a trained token in versions."""
        by_admission = -(-self._ahead // self.groups)
        return by_admission if self.staleness is None or self.in_order else self.staleness

    @property
    def enforced(self) -> int | None:
        """S, where it holds; None where overdue groups are trained on."""
        return None if self.overdue == "reweight" and not self.in_order else self.allowed

    def limit(self, version: int) -> int:
        """Ordinals below it may be admitted under a version."""
        return self.groups * (version + 1) + self._ahead


def check_version(oldest: int, step: int, allowed: int, what: str) -> None:
    """Raise if a token is staler than the bound.

    Args:
        oldest: version of the oldest token.
        step: the version that the training step begins with.
        what: has the token, for the message.

    Raises:
        BoundBroken: saying by how much.
    """
    if step - oldest > allowed:
        raise BoundBroken(f"{what} has a token of version {oldest}, trained on at version {step}: "
                          f"{step - oldest} versions, where {allowed} are allowed")  # fmt: skip


@dataclass(eq=False)
class QueuedGroup:
    """A group on its way.

    Args:
        number: of its admission in the run, from 0.
        prompt: what it is sampled from.
        version: no token of it is older.
        samples: the result; None while it is sampled.
        place: in the order of completion, from 0; -1 while it is sampled.
    """

    number: int
    prompt: Any
    version: int
    samples: Any = None
    place: int = -1

    @property
    def is_complete(self) -> bool:
        return self.place >= 0


@dataclass
class GroupQueue:
    """The groups between admission and training.

    Args:
        bound: admission follows it.
        version: of the newest weights that sampling has.
        trained: c, groups that were taken for training, of this step and those before.

    Attributes:
        counts: ``admitted``, ``trained``, ``passed_over``, ``filtered``, ``failed``, ``surplus``, ``dropped``: every
            group admitted is in one of the others or in the queue, once.

    Example:
        >>> queue = GroupQueue(GroupAdmission(groups=2, chunk=2))
        >>> first, second = queue.admit("a"), queue.admit("b")
        >>> queue.room()
        0
        >>> queue.complete(second, "b's samples"), queue.complete(first, "a's samples")
        (True, True)
        >>> [entry.samples for entry in queue.take()]
        ["a's samples", "b's samples"]
    """

    bound: GroupAdmission
    version: int = 0
    trained: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._entries: dict[int, QueuedGroup] = {}
        self._places = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[QueuedGroup]:
        """In order of admission."""
        return iter(self._entries.values())

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def get(self, number: int) -> QueuedGroup:
        """A group in the queue."""
        return self._entries[number]

    @property
    def step(self) -> int:
        """The training step that the next chunk is for, counted from 0; it begins with the weights of this version."""
        return self.trained // self.bound.groups

    @property
    def lost(self) -> int:
        """Groups that came to nothing until now."""
        return self.counts["filtered"] + self.counts["failed"]

    @property
    def complete_groups(self) -> int:
        """Groups that wait for training."""
        return sum(entry.is_complete for entry in self)

    # ---- sampling ----------------------------------------------------------------------------------------------

    def room(self) -> int:
        """How many groups may be admitted now."""
        return max(0, self.bound.limit(self.version) - self.trained - len(self))

    def admit(self, prompt: Any) -> int:
        """One more group, under the newest version; returns its number."""
        assert self.bound.by_batch or self.room() > 0, "the bound admits no group"
        number = self.counts["admitted"]
        self.counts["admitted"] += 1
        self._entries[number] = QueuedGroup(number, prompt, self.version)
        return number

    def complete(self, number: int, samples: Any, version: int | None = None) -> bool:
        """A group has been sampled; False: it was dropped meanwhile.

        Args:
            version: of its oldest token, if known.

        Raises:
            BoundBroken: that token is older than the group's admission.
        """
        entry = self._entries.get(number)
        if entry is None:
            return False
        if version is not None:
            if version < entry.version and self.bound.enforced is not None:
                raise BoundBroken(f"group {number} was admitted under version {entry.version}, and has older tokens",
                                  got=version)  # fmt: skip
            entry.version = version
        entry.samples, entry.place = samples, self._places
        self._places += 1
        return True

    def lose(self, number: int, why: str) -> None:
        """A group will not be trained on, and makes room for another one.

        Args:
            why: ``filtered``, ``failed`` or ``surplus``.
        """
        if self._entries.pop(number, None) is not None:
            self.counts[why] += 1

    def begin_again(self, number: int) -> None:
        """A group is resampled from its prompt, with the newest version."""
        if number in self._entries:
            entry = self._entries[number]
            entry.version, entry.samples, entry.place = self.version, None, -1

    # ---- training ----------------------------------------------------------------------------------------------

    def drop_overdue(self) -> list[QueuedGroup]:
        """Discard the groups that are too stale for the next chunk, if that is the rule."""
        if self.bound.overdue != "drop" or self.bound.in_order:
            return []
        late = [entry for entry in self if self._last_step(entry) < self.step]
        for entry in late:
            del self._entries[entry.number]
        self.counts["dropped"] += len(late)
        return late

    def is_ready(self) -> bool:
        """Whether `take` has a chunk."""
        return self._chosen() is not None

    def take(self) -> list[QueuedGroup]:
        """The next chunk; its groups leave the queue, in order of admission or of completion.

        Raises:
            BoundBroken: one of them is staler than the bound.
        """
        entries = self._chosen()
        assert entries is not None, "there is no chunk to take"
        for entry in entries:
            if self.bound.enforced is not None:
                check_version(entry.version, self.step, self.bound.enforced, f"group {entry.number}")
            del self._entries[entry.number]
        self.trained += len(entries)
        self.counts["trained"] += len(entries)
        return entries

    def pass_over(self, groups: int) -> None:
        """Of those that were taken, a number that is not trained on, as others were preferred."""
        self.counts["trained"] -= groups
        self.counts["passed_over"] += groups

    def publish(self, version: int) -> None:
        """Sampling has new weights; a version is the number of training steps before it."""
        assert self.version <= version <= self.trained // self.bound.groups, "weights come after their step"
        self.version = version

    def _last_step(self, entry: QueuedGroup) -> int:
        return entry.version + self.bound.allowed

    def _chosen(self) -> list[QueuedGroup] | None:
        """The groups of the next chunk; None: one of them is still to be sampled."""
        number, complete = self.bound.chunk, [entry for entry in self if entry.is_complete]
        if self.bound.in_order:
            first = list(self)[:number]
            return first if len(first) == number and all(entry.is_complete for entry in first) else None
        complete.sort(key=lambda entry: entry.place)
        if self.bound.overdue != "wait":
            return complete[:number] if len(complete) >= number else None
        return self._in_time(complete, number)

    def _in_time(self, complete: list[QueuedGroup], number: int) -> list[QueuedGroup] | None:
        """The earliest complete groups after which all that stay behind can be used in time."""
        selected: set[int] = set()
        for step in sorted({self._last_step(entry) for entry in self}):
            due = [entry for entry in self if self._last_step(entry) <= step and entry.number not in selected]
            trained_later = max(0, (step + 1) * self.bound.groups - self.trained - number)
            may = [entry.number for entry in complete if entry in due]
            needed = len(due) - trained_later
            if needed > len(may):
                return None
            selected |= set(may[: max(0, needed)])
        rest = [entry.number for entry in complete if entry.number not in selected]
        selected |= set(rest[: max(0, number - len(selected))])
        return [entry for entry in complete if entry.number in selected] if len(selected) == number else None

    # ---- what outlives a process ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything but prompts and samples, which the caller saves in the order of the entries."""
        entries = [[entry.number, entry.version, entry.place] for entry in self]
        return {"version": self.version, "trained": self.trained, "counts": dict(self.counts), "entries": entries}

    def load_state_dict(self, state: dict[str, Any], prompts: Sequence[Any], samples: Sequence[Any]) -> None:
        """Continue from a saved queue.

        Args:
            prompts: of every entry.
            samples: of the complete ones.
        """
        self.version, self.trained = int(state["version"]), int(state["trained"])
        self.counts = Counter({str(name): int(number) for name, number in state["counts"].items()})
        self._entries, sampled = {}, iter(samples)
        for (number, version, place), prompt in zip(state["entries"], prompts, strict=True):
            result = next(sampled) if place >= 0 else None
            self._entries[number] = QueuedGroup(number, prompt, version, result, place)
        self._places = max((entry.place for entry in self), default=-1) + 1
