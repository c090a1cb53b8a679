"""What a search for a placement is about: roles, devices, rules, what a choice costs, and the plan that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Generic, TypeVar

from verl.errors import ConfigError, suggest

C = TypeVar("C")
SYNC, ASYNC = "sync", "async"
ACTOR, SAMPLER = "actor", "rollout"


@dataclass(frozen=True)
class RoleCost:
    """What a role takes with one choice of its sizes.

    Args:
        generation, preparation, training: seconds of one step.
        resident: bytes per device that stay while other roles of its pool compute.
        working: bytes per device that it needs besides these while it computes.
        update: of the sampler, seconds until it has new weights from an actor in its pool.
        update_across: the same from an actor in another pool.
    """

    generation: float = 0.0
    preparation: float = 0.0
    training: float = 0.0
    resident: float = 0.0
    working: float = 0.0
    update: float = 0.0
    update_across: float = 0.0

    def sampling(self, inside: bool) -> float:
        """Seconds of generation and of new weights; ``inside``: the actor is in the same pool."""
        return self.generation + (self.update if inside else self.update_across)

    def seconds(self, inside: bool) -> float:
        """Seconds of all stages."""
        return self.sampling(inside) + self.preparation + self.training


@dataclass(frozen=True)
class PlacementRules:
    """What a plan must keep to.

    Args:
        together: sets of roles that share a pool.
        separate: pairs of roles that must not.
        devices: of the pool of a role.
        schedules: that are admitted.
    """

    together: tuple[frozenset[str], ...] = ()
    separate: tuple[frozenset[str], ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)
    schedules: tuple[str, ...] = (SYNC, ASYNC)


@dataclass(frozen=True)
class SearchSpace(Generic[C]):
    """The roles, the devices, and the cost model.

    Args:
        roles: with or without a sampler, named ``rollout``; weights come from ``actor``.
        devices: in all.
        memory: bytes of one.
        sizes: numbers of devices that a pool may have.
        choices: the parallel sizes, budgets and offloading of a role on a number of devices; none where no grid fits.
        cost: of a role on a number of devices with a choice.
        rules: of the user's.
        group: choices of one pool have the same; None: a choice that is at one with every other.
    """

    roles: tuple[str, ...]
    devices: int
    memory: float
    sizes: tuple[int, ...]
    choices: Callable[[str, int], Iterable[C]]
    cost: Callable[[str, int, C], RoleCost]
    rules: PlacementRules = PlacementRules()
    group: Callable[[C], Hashable] = lambda _: None


@dataclass(frozen=True)
class PoolPlan(Generic[C]):
    """A pool of a plan: its devices, and of each role the choice and what it costs."""

    devices: int
    choices: Mapping[str, C]
    costs: Mapping[str, RoleCost]

    @property
    def bytes(self) -> float:
        """Per device, at the largest moment."""
        costs = self.costs.values()
        return sum(cost.resident for cost in costs) + max(cost.working for cost in costs)

    @property
    def stages(self) -> tuple[float, float, float]:
        """Seconds of generation, preparation and training."""
        costs = self.costs.values()
        generation = sum(cost.sampling(ACTOR in self.costs) for cost in costs)
        return generation, sum(cost.preparation for cost in costs), sum(cost.training for cost in costs)


@dataclass(frozen=True)
class PlacementPlan(Generic[C]):
    """A placement with everything that it costs.

    Args:
        schedule: ``sync`` or ``async``.
        pools: the actor's first.
        bound: no plan under the same rules takes fewer seconds.
        points: limits (P, T) that the search looked at.
    """

    schedule: str
    pools: tuple[PoolPlan[C], ...]
    bound: float = 0.0
    points: int = 0

    @property
    def stages(self) -> tuple[float, float, float]:
        """Seconds of generation, preparation and training: the slowest pool's of each."""
        generation, preparation, training = map(max, zip(*(pool.stages for pool in self.pools), strict=True))
        return generation, preparation, training

    @property
    def seconds(self) -> float:
        """Of a step."""
        return step_seconds_of(self.schedule, *self.stages)

    @property
    def gap(self) -> float:
        """By which share of itself the plan may be slower than the best one."""
        return 1 - self.bound / self.seconds

    @property
    def kind(self) -> tuple[str, frozenset[frozenset[str]]]:
        """The schedule, and which roles share a pool."""
        return self.schedule, frozenset(frozenset(pool.choices) for pool in self.pools)

    @property
    def devices(self) -> int:
        """That some pool uses."""
        return sum(pool.devices for pool in self.pools)

    def __str__(self) -> str:
        return ", ".join(f"{'+'.join(pool.choices)} on {pool.devices}" for pool in self.pools) + f" ({self.schedule})"


def step_seconds_of(schedule: str, generation: float, preparation: float, training: float) -> float:
    """Seconds of a step from those of its stages."""
    rest = preparation + training
    return max(generation, rest) if schedule == ASYNC else generation + rest


class NoPlacement(ConfigError):
    """The roles fit nowhere under the rules."""


def pool_sizes(devices: int, node: int) -> tuple[int, ...]:
    """Devices that a pool may have: all of several machines, or a power of two that divides one.

    Such pools leave no machine with a remainder: any of them fit as long as their sum is at most ``devices``.
    """
    parts = (1 << power for power in range(node.bit_length()))
    return (*(size for size in parts if size < node and node % size == 0 and size <= devices),
            *range(node, devices + 1, node))  # fmt: skip


def check_rules(space: SearchSpace[C]) -> None:
    """Refuse rules that contradict each other.

    Raises:
        ConfigError: with the roles and numbers.
    """
    rules, names = space.rules, set(space.roles)
    in_rules = set().union(*rules.together, *rules.separate, rules.devices)
    for name in sorted(in_rules - names):
        raise ConfigError("the run has no such role", key="rules", got=name, allowed=space.roles,
                          fix=suggest(name, names))  # fmt: skip
    groups = [set(group) for group in rules.together]
    for first, second in combinations(range(len(groups)), 2):
        if groups[first] & groups[second]:
            groups[second] |= groups[first]
    if rules.schedules == (ASYNC,) and (SAMPLER not in names or any({SAMPLER} < group for group in groups)):
        raise ConfigError("an asynchronous step needs a pool with the sampler alone", key="rules", got=ASYNC,
                          fix="Admit the schedule sync, or put no other role into the sampler's pool.")  # fmt: skip
    for pair in rules.separate:
        if any(pair <= group for group in groups):
            raise ConfigError("the rules put these roles into one pool and into different ones", key="rules",
                              got=" and ".join(sorted(pair)), fix="Remove one of the two rules.")  # fmt: skip
    for group in groups:
        by_rule = {role: rules.devices[role] for role in sorted(group) if role in rules.devices}
        if len(set(by_rule.values())) > 1:
            raise ConfigError("roles of one pool have the same devices, and the rules give them different numbers",
                              key="rules", got=by_rule, fix="Give them one number, or separate pools.")  # fmt: skip
    for role, devices in rules.devices.items():
        if devices > space.devices or devices not in space.sizes:
            sizes = [size for size in space.sizes if size <= space.devices]
            near = sorted(sorted(sizes, key=lambda size: abs(size - devices))[:4])
            what = f"a pool of {role} cannot have this number of devices, of {space.devices} in all"
            raise ConfigError(what, key="rules", got=devices, allowed=near, fix="These are the nearest sizes.")
