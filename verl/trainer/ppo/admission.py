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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

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
