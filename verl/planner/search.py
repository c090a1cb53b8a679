"""Where the roles of a run go: the fastest placement under a cost model.

The model
---------
A placement divides the roles into pools; every role of a pool uses all devices of it, in turn with the others. A step
has three stages: generation, preparation (log-probs, values, rewards) and training. A pool takes in a stage the sum of
its roles' seconds, and a stage the maximum over the pools. The schedules differ in how stages add up:

- ``sync``: generation + preparation + training;
- ``async``: the sampler has a pool without other roles, and a step takes max(generation, preparation + training).

A pool fits where the resident bytes of its roles and the largest working bytes of one of them are at most the memory
of a device. Only the sampler has seconds of generation.

The search
----------
HybridFlow enumerates set partitions of the roles, and for each of them every division of the devices (2409.19256,
Algorithm 1; `benchmarks/placement_crossovers.py` has it). Here the problem is separated. With limits P and T on the
seconds of preparation and training,

- a pool without the sampler needs a number of devices that no other pool changes, need(pool, P, T);
- a set of roles needs D(set) = min over the pools of its first role of need(pool) + D(set - pool);
- what D leaves goes to the sampler's pool, whose generation is then as short as can be.

So one point (P, T) costs 3^k / 2 additions, all 203 placements of six roles included. The optimal P and T are sums of
seconds that some pool has, and these form a grid. A box of the grid has a lower bound (its smallest limits, with
the generation that its largest limits admit) and an upper one (its largest limits); boxes whose lower bound does not
beat the best plan are dropped, the others are cut in four (branch and bound). The last box is a point: the plan is
optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from verl.planner.space import (
    ACTOR,
    ASYNC,
    SAMPLER,
    SYNC,
    NoPlacement,
    PlacementPlan,
    PoolPlan,
    RoleCost,
    SearchSpace,
)

C = TypeVar("C")
Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]
Options: TypeAlias = Mapping[str, Mapping[int, Sequence[tuple[C, RoleCost]]]]
"""Role -> devices -> its choices with what they cost."""

_BOXES = 256
"""Boxes that are cut at once."""
_FAR = 1 << 40
"""Devices of a pool that no number of them makes fast enough."""


@dataclass
class _Front:
    """Combinations of the choices of a pool's roles, none of which is better than another one in every respect.

    Args:
        values: per row generation, preparation, training, resident and working.
        picks: per row, the number of a choice of each role in the order of the space's.
    """

    values: Floats
    picks: Integers


@dataclass
class _Table:
    """The rows of a pool over all numbers of devices; picks lead back to a front."""

    devices: Integers
    values: Floats
    rows: Integers


def _undominated(values: Floats) -> Integers:
    """Rows that no other row is as good as in every column, least is best; of equal rows the first."""
    rows = np.lexsort((*values.T[::-1], values.sum(1)))
    place = 0
    while place < len(rows):
        better = (values[rows] < values[rows[place]]).any(1)
        better[place] = True
        place = int(better[:place].sum()) + 1
        rows = rows[better]
    return rows.astype(np.int64)


class PlacementSearch(Generic[C]):
    """A space with what was computed of it.

    Raises:
        NoPlacement: no number of devices is one that a role's grid can use.
    """

    def __init__(self, space: SearchSpace[C]):
        self.space = space
        names = [SAMPLER] * (SAMPLER in space.roles) + [role for role in space.roles if role != SAMPLER]
        self._names = tuple(names)
        self.all_roles = (1 << len(names)) - 1
        self._sampler = int(SAMPLER in space.roles)  # its bit is the lowest
        self.options: Options[C] = {role: self._options_of(role) for role in names}
        self._fronts: dict[tuple[int, int, Hashable], _Front] = {}
        self._tables: dict[int, _Table] = {}

    # ---- what a role and a pool cost ------------------------------------------------------------------------------

    def _options_of(self, role: str) -> dict[int, list[tuple[C, RoleCost]]]:
        space, options = self.space, dict[int, list[tuple[C, RoleCost]]]()
        for devices in space.sizes:
            if devices > space.devices:
                continue
            costs = [(choice, space.cost(role, devices, choice)) for choice in space.choices(role, devices)]
            if costs:
                options[devices] = costs
        if not options:
            message = "no parallel size of this role divides any number of devices that a pool may have"
            if role == SAMPLER:
                message += ", or none leaves room for the weights and the KV cache of one sequence"
            raise NoPlacement(message, key=role, got=f"{space.devices} devices",
                              fix="Take a number that the parallel sizes and the batch divide, or larger devices."
                              )  # fmt: skip
        return options

    def roles_of(self, mask: int) -> list[str]:
        """The roles of a bit mask, the sampler first."""
        return [role for number, role in enumerate(self._names) if mask >> number & 1]

    def _role_front(self, role: str, devices: int, inside: bool, group: Hashable) -> _Front:
        rows, numbers = [], []
        for number, (choice, cost) in enumerate(self.options[role].get(devices, [])):
            if self.space.group(choice) in (None, group):
                rows.append([cost.sampling(inside), cost.preparation, cost.training, cost.resident, cost.working])
                numbers.append(number)
        values = np.array(rows, dtype=np.float64).reshape(len(rows), 5)
        best = self._useful(values)
        picks = np.full((len(best), len(self._names)), -1)
        picks[:, self._names.index(role)] = np.array(numbers, dtype=np.int64)[best]
        return _Front(values[best], picks)

    def _front(self, mask: int, devices: int, inside: bool) -> _Front:
        """Of a pool, over all groups of choices that its roles may have together."""
        choices = [choice for role in self.roles_of(mask) for choice, _ in self.options[role].get(devices, [])]
        groups = dict.fromkeys(map(self.space.group, choices))
        if len(groups) > 1:
            groups.pop(None, None)
        fronts = [self._group_front(mask, devices, inside, group) for group in groups or [None]]
        if len(fronts) == 1:
            return fronts[0]
        values, picks = (np.concatenate(part) for part in zip(*((f.values, f.picks) for f in fronts), strict=True))
        best = _undominated(values)
        return _Front(values[best], picks[best])

    def _group_front(self, mask: int, devices: int, inside: bool, group: Hashable) -> _Front:
        """Of one group; the sampler is joined last, as its update depends on whether the actor is ``inside``."""
        key = (mask << 1) | (inside and mask & self._sampler), devices, group
        if key not in self._fronts:
            lowest = mask & -mask
            last = self._role_front(self._names[lowest.bit_length() - 1], devices, inside, group)
            rest = mask ^ lowest
            self._fronts[key] = self._joined(self._group_front(rest, devices, inside, group), last) if rest else last
        return self._fronts[key]

    def _joined(self, left: _Front, right: _Front) -> _Front:
        rows, columns = (axis.ravel() for axis in np.indices((len(left.values), len(right.values))))
        values = left.values[rows] + right.values[columns]
        values[:, 4] = np.maximum(left.values[rows, 4], right.values[columns, 4])
        best = self._useful(values)
        return _Front(values[best], np.maximum(left.picks[rows[best]], right.picks[columns[best]]))

    def _useful(self, values: Floats) -> Integers:
        """Rows that fit, and that no other row makes superfluous."""
        rows = np.flatnonzero(values[:, 3] + values[:, 4] <= self.space.memory)
        return rows[_undominated(values[rows])]

    def _table(self, mask: int) -> _Table:
        if mask not in self._tables:
            roles = self.roles_of(mask)
            usable = sorted(set.intersection(*(set(self.options[role]) for role in roles)))
            parts = []
            for devices in usable:
                values = self._front(mask, devices, ACTOR in roles).values[:, :3]
                parts += [(devices, *row, number) for number, row in enumerate(values.tolist())]
            rows = np.array(parts, dtype=np.float64).reshape(len(parts), 5)
            rows = rows[_undominated(rows[:, :4])]
            rows = rows[np.lexsort((rows[:, 0], rows[:, 1] if mask & self._sampler else rows[:, 0]))]
            self._tables[mask] = _Table(rows[:, 0].astype(np.int64), rows[:, 1:4], rows[:, 4].astype(np.int64))
        return self._tables[mask]

    # ---- the search ------------------------------------------------------------------------------------------------

    def best(self, schedules: Sequence[str] | None = None,
             admits: Callable[[frozenset[str]], bool] = lambda _: True) -> PlacementPlan[C] | None:  # fmt: skip
        """The fastest plan.

        Args:
            schedules: fewer than those of the space.
            admits: whether roles may form a pool.

        Returns:
            None where nothing fits; `explanation` lists what the roles need.
        """
        masks = [mask for mask in range(1, self.all_roles + 1) if admits(frozenset(self.roles_of(mask)))]
        point = _Point(self, masks, self.space.schedules if schedules is None else schedules)
        empty = np.zeros((0, 3))
        seconds = np.concatenate([empty, *(self._table(mask).values for mask in point.pools)])
        limits = [np.unique(seconds[:, stage]) for stage in (1, 2)]
        if not all(map(len, limits)):
            return None
        low, high = np.zeros((1, 2), dtype=np.int64), np.array([[len(limits[0]) - 1, len(limits[1]) - 1]])
        best_seconds, best_limits, points = math.inf, (0.0, 0.0), 0
        bounds = np.zeros(1)
        while len(low):
            order = np.argsort(bounds, kind="stable")
            now, later = order[:_BOXES], order[_BOXES:]
            cut_low, cut_high = _cut(low[now], high[now]) if points else (low, high)
            top = limits[0][cut_high[:, 0]], limits[1][cut_high[:, 1]]
            floor = limits[0][cut_low[:, 0]] + limits[1][cut_low[:, 1]]
            above, below = point.seconds(*top, top[0] + top[1]), point.seconds(*top, floor)
            points += len(above)
            if above.min() < best_seconds:
                first = int(above.argmin())
                best_seconds, best_limits = float(above[first]), (float(top[0][first]), float(top[1][first]))
            is_open = (cut_low < cut_high).any(1)
            low = np.concatenate([low[later], cut_low[is_open]])
            high = np.concatenate([high[later], cut_high[is_open]])
            bounds = np.concatenate([bounds[later], below[is_open]])
            keeps = bounds < best_seconds
            low, high, bounds = low[keeps], high[keeps], bounds[keeps]
        if best_seconds == math.inf:
            return None
        plan = point.plan(*best_limits)
        return PlacementPlan(plan.schedule, plan.pools, points)

    def pool(self, mask: int, number: int) -> PoolPlan[C]:
        """The pool behind a row of its table."""
        table, roles = self._table(mask), self.roles_of(mask)
        devices = int(table.devices[number])
        picks = self._front(mask, devices, ACTOR in roles).picks[table.rows[number]]
        selection = {role: self.options[role][devices][picks[self._names.index(role)]] for role in roles}
        return PoolPlan(devices, {role: choice for role, (choice, _) in selection.items()},
                        {role: cost for role, (_, cost) in selection.items()})  # fmt: skip

    def runners_up(self, plan: PlacementPlan[C]) -> list[PlacementPlan[C]]:
        """The best of other kinds: all roles in one pool, each alone, some together; and of the other schedule."""
        count = len(self._names)
        others = [self.best(admits=lambda roles: len(roles) == count),
                  self.best(admits=lambda roles: len(roles) == 1),
                  self.best(admits=lambda roles: len(roles) < count),
                  *(self.best([schedule]) for schedule in self.space.schedules)]  # fmt: skip
        kinds = {plan.kind: plan}
        for other in others:
            if other is not None:
                kinds.setdefault(other.kind, other)
        return sorted(list(kinds.values())[1:], key=lambda other: other.seconds)


def explanation(search: PlacementSearch[C]) -> NoPlacement:
    """What each role needs, where a search has no plan."""
    space, needs = search.space, []
    for role in space.roles:
        need, devices = min((cost.resident + cost.working, devices)
                            for devices, options in search.options[role].items() for _, cost in options)  # fmt: skip
        needs.append(f"{role} {need / 1e9:.1f} GB on each of {devices}")
    message = f"no placement fits; the least that each role needs: {', '.join(needs)}"
    return NoPlacement(message, key="plan", got=f"{space.devices} devices of {space.memory / 1e9:.1f} GB",
                       fix="Take more or larger devices, or a smaller data.max_response_length."
                       )  # fmt: skip


class _Point(Generic[C]):
    """What limits on preparation and training leave for generation, for many pairs of limits at once."""

    def __init__(self, search: PlacementSearch[C], pools: list[int], schedules: Sequence[str]):
        self._search, self.pools, self._schedules = search, pools, schedules
        self._sampler, self._all = search._sampler, search.all_roles
        self._without = [mask for mask in pools if not mask & self._sampler]
        self._with = [mask for mask in pools if mask & self._sampler]

    def _fitting(self, mask: int, preparation: Floats, training: Floats) -> npt.NDArray[np.bool_]:
        values = self._search._table(mask).values
        return (values[:, 1] <= preparation[:, None]) & (values[:, 2] <= training[:, None])

    def _needs(self, preparation: Floats, training: Floats) -> dict[int, Integers]:
        """Devices of each set of roles without the sampler, `_FAR` or more where there is no way."""
        needs = {}
        for mask in self._without:
            devices = self._search._table(mask).devices
            fits = self._fitting(mask, preparation, training)
            needs[mask] = np.where(fits.any(1), devices[fits.argmax(1)] if len(devices) else 0, _FAR)
        least: dict[int, Integers] = {0: np.zeros(len(preparation), dtype=np.int64)}
        for roles in range(1, self._all + 1):
            if roles & self._sampler:
                continue
            first, best = roles & -roles, np.full(len(preparation), _FAR)
            for mask, need in needs.items():
                if mask & first and mask & roles == mask:
                    best = np.minimum(best, need + least[roles ^ mask])
            least[roles] = best
        return least

    def _generations(self, preparation: Floats, training: Floats) -> Iterator[tuple[int, Floats]]:
        """Of each pool with the sampler, seconds of generation with the devices that the other roles leave."""
        least = self._needs(preparation, training)
        if not self._sampler:
            yield 0, np.where(least[self._all] <= self._search.space.devices, 0.0, math.inf)
        for mask in self._with:
            table, left = self._search._table(mask), self._search.space.devices - least[self._all ^ mask]
            fits = self._fitting(mask, preparation, training) & (table.devices <= left[:, None])
            seconds = table.values[fits.argmax(1), 0] if len(table.devices) else 0.0
            yield mask, np.where(fits.any(1), seconds, math.inf)

    def _per_schedule(self, preparation: Floats, training: Floats, rest: Floats) -> Iterator[tuple[str, int, Floats]]:
        for mask, generation in self._generations(preparation, training):
            if SYNC in self._schedules:
                yield SYNC, mask, generation + rest
            if ASYNC in self._schedules and mask and mask == self._sampler:
                yield ASYNC, mask, np.maximum(generation, rest)

    def seconds(self, preparation: Floats, training: Floats, rest: Floats) -> Floats:
        """Of a step, where preparation and training take ``rest``; infinite where nothing fits."""
        best = np.full(len(preparation), math.inf)
        for _, _, seconds in self._per_schedule(preparation, training, rest):
            best = np.minimum(best, seconds)
        return best

    def plan(self, preparation: float, training: float) -> PlacementPlan[C]:
        """The plan of one pair of limits."""
        limits = np.array([preparation]), np.array([training])
        options = self._per_schedule(*limits, limits[0] + limits[1])
        schedule, mask, _ = min(options, key=lambda option: float(option[2][0]))
        rows = []
        least = self._needs(*limits)
        roles = self._all ^ mask
        if mask:
            table, left = self._search._table(mask), self._search.space.devices - least[roles]
            fits = self._fitting(mask, *limits) & (table.devices <= left[:, None])
            rows.append((mask, int(fits.argmax())))
        while roles:
            part, row = next(self._divided(roles, least, limits))
            rows.append((part, row))
            roles ^= part
        pools = [self._search.pool(*row) for row in rows]
        return PlacementPlan(schedule, tuple(sorted(pools, key=lambda pool: ACTOR not in pool.choices)))

    def _divided(self, roles: int, least: Mapping[int, Integers], limits: tuple[Floats, Floats]
                 ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Pools of the first role that a division with the fewest devices has, and their rows."""
        for mask in self._without:
            if mask & roles & -roles and mask & roles == mask:
                fits = self._fitting(mask, *limits)[0]
                if fits.any():
                    row = int(fits.argmax())
                    devices = self._search._table(mask).devices[row]
                    if devices + least[roles ^ mask][0] == least[roles][0]:
                        yield mask, row


def _cut(low: Integers, high: Integers) -> tuple[Integers, Integers]:
    """Boxes of the grid in halves along both axes, corners included; a box that is a line is cut once."""
    middle = (low + high) // 2
    lows, highs = [], []
    for first in (0, 1):
        for second in (0, 1):
            part = np.array([first, second])
            begin, end = np.where(part, middle + 1, low), np.where(part, high, middle)
            is_box = (begin <= end).all(1)
            lows.append(begin[is_box])
            highs.append(end[is_box])
    return np.concatenate(lows), np.concatenate(highs)
