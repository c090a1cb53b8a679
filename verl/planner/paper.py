"""Algorithm 1 of HybridFlow (2409.19256): the mapping of models to devices as published, to compare the search with.

Every set partition, every division of the devices, and for each role of a pool the choice with the fewest seconds that
leaves the least bytes that the other roles need: unlike `PlacementSearch.best`, roles do not trade memory for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from verl.planner.search import Options, PlacementSearch
from verl.planner.space import ACTOR, SYNC, PlacementPlan, PoolPlan, RoleCost, SearchSpace

C = TypeVar("C")


def algorithm_1(search: PlacementSearch[C]) -> PlacementPlan[C] | None:
    """The plan of the published algorithm, which is synchronous.

    Returns:
        None where nothing fits.
    """
    best, pools = None, dict[tuple[frozenset[str], int], PoolPlan[C] | None]()
    for partition in _partitions(search.space.roles, search.pools):
        for devices in _divisions(len(partition), search.space.devices, sorted(search.space.sizes)):
            parts = []
            for key in zip(partition, devices, strict=True):
                if key not in pools:
                    pools[key] = _fastest(search.space, search.options, *key)
                pool = pools[key]
                if pool is None:
                    break
                parts.append(pool)
            if len(parts) == len(partition):
                plan = PlacementPlan(SYNC, tuple(parts))
                best = plan if best is None or plan.seconds < best.seconds else best
    return best


def _fastest(space: SearchSpace[C], options: Options[C], pool: frozenset[str], devices: int) -> PoolPlan[C] | None:
    roles = [role for role in space.roles if role in pool]
    per_role = [options[role].get(devices, []) for role in roles]
    if not all(per_role) or any(space.rules.devices.get(role, devices) != devices for role in roles):
        return None
    least = [(min(c.resident for _, c in some), min(c.working for _, c in some)) for some in per_role]
    choices, costs = dict[str, C](), dict[str, RoleCost]()
    for number, (role, some) in enumerate(zip(roles, per_role, strict=True)):
        resident = sum(c.resident for c in costs.values()) + sum(r for r, _ in least[number + 1 :])
        working = max([c.working for c in costs.values()] + [w for _, w in least[number + 1 :]], default=0.0)
        fits = [(c, cost) for c, cost in some
                if resident + cost.resident + max(working, cost.working) <= space.memory]  # fmt: skip
        if not fits:
            return None
        choices[role], costs[role] = min(fits, key=lambda entry: entry[1].seconds(ACTOR in pool))
    return PoolPlan(devices, choices, costs)


def _partitions(roles: Sequence[str], pools: Sequence[frozenset[str]]) -> Iterator[list[frozenset[str]]]:
    """Ways to divide roles into pools."""
    if not roles:
        yield []
    for pool in pools:
        if roles and roles[0] in pool and pool <= set(roles):
            for rest in _partitions([role for role in roles if role not in pool], pools):
                yield [pool, *rest]


def _divisions(parts: int, devices: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to give each of the parts a size, all of them within the devices; ``sizes`` ascend."""
    if parts == 0:
        yield ()
        return
    for size in sizes:
        if size > devices - (parts - 1) * sizes[0]:
            break
        for rest in _divisions(parts - 1, devices - size, sizes):
            yield (size, *rest)
