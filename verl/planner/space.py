"""What a search for a placement is about: roles, devices, what a choice costs, and the plan that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl.errors import ConfigError

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
class SearchSpace(Generic[C]):
    """The roles, the devices, and the cost model.

    Args:
        roles: with or without a sampler, named ``rollout``; weights come from ``actor``.
        devices: in all.
        memory: bytes of one.
        sizes: numbers of devices that a pool may have.
        choices: the parallel sizes, budgets and offloading of a role on a number of devices; none where no grid fits.
        cost: of a role on a number of devices with a choice.
        schedules: that are admitted.
        group: choices of one pool have the same; None: a choice that is at one with every other.
    """

    roles: tuple[str, ...]
    devices: int
    memory: float
    sizes: tuple[int, ...]
    choices: Callable[[str, int], Iterable[C]]
    cost: Callable[[str, int, C], RoleCost]
    schedules: tuple[str, ...] = (SYNC, ASYNC)
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
        points: limits (P, T) that the search looked at.
    """

    schedule: str
    pools: tuple[PoolPlan[C], ...]
    points: int = 0

    @property
    def stages(self) -> tuple[float, float, float]:
        """Seconds of generation, preparation and training: the slowest pool's of each."""
        generation, preparation, training = map(max, zip(*(pool.stages for pool in self.pools), strict=True))
        return generation, preparation, training

    @property
    def seconds(self) -> float:
        """Of a step."""
        generation, preparation, training = self.stages
        rest = preparation + training
        return max(generation, rest) if self.schedule == ASYNC else generation + rest

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


class NoPlacement(ConfigError):
    """The roles fit nowhere."""


def pool_sizes(devices: int, node: int) -> tuple[int, ...]:
    """Devices that a pool may have: all of several machines, or a power of two that divides one.

    Such pools leave no machine with a remainder: any of them fit as long as their sum is at most ``devices``.
    """
    parts = (1 << power for power in range(node.bit_length()))
    return (*(size for size in parts if size < node and node % size == 0 and size <= devices),
            *range(node, devices + 1, node))  # fmt: skip
