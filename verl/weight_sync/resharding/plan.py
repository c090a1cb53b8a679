"""The plan of a weight sync from the training to the sampling layout: a value that is printed, priced and executed.

One entry stands for all weights of one shape that travel in the same way; `Plan.expanded` names each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from verl.errors import ConfigError
from verl.weight_sync.resharding.assignment import matched, rank_classes
from verl.weight_sync.resharding.layout import (
    Coordinates,
    Indices,
    Layout,
    divides,
    same_world,
    zero_redundancy,
)
from verl.weight_sync.resharding.model import ENDS, FIRST, LAST, LAYER, ModelWeights, Weight
from verl.weight_sync.resharding.routes import Division, Routes, common_unit, overlaps, routes_between

BEST, ZERO_REDUNDANCY, CONSECUTIVE, MATCHED = "best", "zero_redundancy", "consecutive", "matched"
ASSIGNMENTS = (BEST, ZERO_REDUNDANCY, CONSECUTIVE, MATCHED)


@dataclass(frozen=True)
class Entry:
    """Weights of one template that are divided in one way on both sides.

    Args:
        layers, experts: which of the template; one number 0 each where it has none.
        source, target: how one of them is divided for training and for sampling.
        routes: the parts that travel; shared by entries that are divided alike.
    """

    weight: Weight
    layers: Sequence[int]
    experts: range
    source: Division
    target: Division
    routes: Routes

    @property
    def count(self) -> int:
        """How many weights this stands for."""
        return len(self.layers) * len(self.experts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them, whole."""
        return self.count * self.weight.num_bytes

    def names(self) -> Iterator[tuple[int, str]]:
        """The layer (-1: none) and the name of each."""
        layered = self.weight.place == LAYER
        for layer in self.layers:
            for expert in self.experts:
                yield layer if layered else -1, self.weight.name.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Price:
    """What a plan costs; arrays are ``(world,)`` bytes per rank."""

    received: Indices
    sent: Indices
    needed: Indices
    owned: Indices
    kept: Indices

    @property
    def total(self) -> int:
        """Bytes on the wire."""
        return int(self.received.sum())

    @property
    def redundant(self) -> Indices:
        """Bytes of a rank's training shard that its sampling shard has no use for: a second copy while sampling."""
        return self.owned - self.kept


@dataclass(frozen=True)
class Plan:
    """Who sends which slice of which weight to whom.

    Example:
        >>> plan = make_plan(decoder(layers=64, ...), Layout(8, 1, 2), Layout(2, 1, 8))
        >>> print(plan)
    """

    model: ModelWeights
    training: Layout
    sampling: Layout
    assignment: str
    places: Coordinates
    entries: Sequence[Entry] = field(repr=False)

    @cached_property
    def price(self) -> Price:
        """Bytes per rank, summed over all weights."""
        world = self.sampling.world
        sums = {name: np.zeros(world) for name in ("received", "sent", "needed", "owned", "kept")}
        for entry in self.entries:
            routes, size = entry.routes, entry.num_bytes
            sums["received"] += size * np.bincount(routes.receiver, routes.share, world)
            sums["sent"] += size * np.bincount(routes.sender, routes.share, world)
            for name in ("needed", "owned", "kept"):
                sums[name] += size * getattr(routes, name)
        return Price(**{name: np.rint(values).astype(np.int64) for name, values in sums.items()})

    def expanded(self) -> Iterator[tuple[int, str, Entry]]:
        """Every weight: its layer (-1: none), name and entry; what stands before and after the layers comes first."""
        named = [(layer, name, entry) for entry in self.entries for layer, name in entry.names()]
        return iter(sorted(named, key=lambda item: item[0]))

    def __str__(self) -> str:
        price, model = self.price, max(self.model.num_bytes, 1)
        lines = [
            f"{self.training} to {self.sampling} on {self.sampling.world} ranks ({self.assignment}): "
            f"{price.total:,} bytes on the wire, model {model:,}",
            "rank  place        owned     needed   received       sent  redundant",
        ]
        for rank in range(self.sampling.world):
            place = f"t{self.places.tensor[rank]} p{self.places.stage[rank]} d{self.places.replica[rank]}"
            values = (price.owned, price.needed, price.received, price.sent, price.redundant)
            lines.append(f"{rank:4}  {place:9}" + "".join(f"{value[rank] / model:10.4f}M" for value in values))
        return "\n".join(lines)


def closed_form(training: Layout, sampling: Layout) -> float:
    """Share of the model that each rank receives under HybridFlow's grouping (section 5.4, Table 2).

    It counts every weight as cut; weights that each tensor-parallel rank holds anyway need not travel.
    """
    sources, targets = training.tensor * training.pipeline, sampling.tensor * sampling.pipeline
    return (sources - targets) / (targets * sources)


def make_plan(model: ModelWeights, training: Layout, sampling: Layout, assignment: str = BEST) -> Plan:
    """Plan a weight sync.

    Args:
        assignment: which rank takes which sampling place: ``zero_redundancy`` (HybridFlow), ``consecutive`` ranks per
            sampling group, ``matched`` (the fewest bytes of all), or ``best``: the first where it exists, else the
            third.

    Raises:
        ConfigError: other ranks, sizes that do not divide layers, heads or rows, or an unknown assignment.
    """
    same_world(training, sampling)
    if assignment not in ASSIGNMENTS:
        raise ConfigError("unknown assignment of ranks", key="assignment", got=assignment, allowed=ASSIGNMENTS)
    here = training.coordinates()
    if assignment == BEST:
        nested = divides(training, sampling) and not _has_experts(model)
        assignment = ZERO_REDUNDANCY if nested else MATCHED
    if assignment == ZERO_REDUNDANCY:
        places = zero_redundancy(training, sampling)
    else:
        places = sampling.coordinates()
        if assignment == MATCHED:
            places = matched(here, places, _common_bytes(model, training, here, sampling, places))
    entries = _entries(model, training, here, sampling, places)
    return Plan(model, training, sampling, assignment, places, entries)


def _has_experts(model: ModelWeights) -> bool:
    return any(weight.experts for weight in model.weights)


def _entries(
    model: ModelWeights, training: Layout, here: Coordinates, sampling: Layout, there: Coordinates
) -> list[Entry]:
    cache: dict[object, Routes] = {}
    entries = []
    for weight in model.weights:
        for layers, source_stages, target_stages in _by_stage(model, weight, training, sampling):
            for experts, source_expert, target_expert in _by_expert(weight, training, sampling):
                source = _division(weight, training, here, source_stages, source_expert)
                target = _division(weight, sampling, there, target_stages, target_expert)
                unit = common_unit(source.bounds, target.bounds) if source.axis == target.axis else 0
                borders = [tuple(b // (unit or common_unit(d.bounds, ())) for b in d.bounds) for d in (source, target)]
                stages = (source_stages, target_stages, source_expert, target_expert)
                # Experts count their replicas otherwise than dense weights, even where one rank holds all of them.
                key = (*borders, source.axis == target.axis, *stages, weight.experts > 0)
                if key not in cache:
                    cache[key] = routes_between(source, target)
                entries.append(Entry(weight, layers, experts, source, target, cache[key]))
    return entries


def _by_stage(
    model: ModelWeights, weight: Weight, training: Layout, sampling: Layout
) -> Iterator[tuple[Sequence[int], tuple[int, ...], tuple[int, ...]]]:
    """The layers that one stage holds on both sides, with these stages."""
    sizes = (training.pipeline, sampling.pipeline)
    if weight.place != LAYER:
        ends = [{FIRST: (0,), LAST: (n - 1,), ENDS: tuple({0, n - 1})}[weight.place] for n in sizes]
        yield range(1), ends[0], ends[1]
        return
    for source_stage in range(sizes[0]):
        for target_stage in range(sizes[1]):
            here = set(training.layers_of(source_stage, model.layers))
            there = sampling.layers_of(target_stage, model.layers)
            both = [n for n in there if n in here and (weight.only is None or n in weight.only)]
            if both:
                yield both, (source_stage,), (target_stage,)


def _by_expert(weight: Weight, training: Layout, sampling: Layout) -> Iterator[tuple[range, int, int]]:
    sizes = (training.expert, sampling.expert)
    if not weight.experts:
        yield range(1), -1, -1
        return
    for size in sizes:
        if weight.experts % size:
            raise ConfigError(
                f"{weight.experts} experts do not divide",
                key="expert",
                got=size,
                allowed=[n for n in range(1, weight.experts + 1) if weight.experts % n == 0],
            )
    step = math.gcd(weight.experts // sizes[0], weight.experts // sizes[1])
    for start in range(0, weight.experts, step):
        owners = [start * size // weight.experts for size in sizes]
        yield range(start, start + step), owners[0], owners[1]


def _division(weight: Weight, layout: Layout, at: Coordinates, stages: tuple[int, ...], expert: int) -> Division:
    ranks, number, replica = layout.tensor, at.tensor, at.replica
    if weight.experts:
        ranks, number, replica = layout.expert_tensor_size, at.expert_tensor, at.expert_replica
    axis, bounds = weight.bounds(ranks)
    index = number * (len(bounds) - 1) // ranks
    holds = np.isin(at.stage, stages)
    if weight.experts:
        holds &= at.expert == expert
    return Division(axis, bounds, np.where(holds, index, -1), replica)


def _common_bytes(
    model: ModelWeights, training: Layout, here: Coordinates, sampling: Layout, there: Coordinates
) -> np.ndarray:
    """(training classes, sampling classes) bytes that a rank of the one finds useful in a place of the other."""
    sources = np.array([ranks[0] for ranks in rank_classes(here)[0]])
    targets = np.array([ranks[0] for ranks in rank_classes(there)[0]])
    sums = np.zeros((len(sources), len(targets)))
    for entry in _entries(model, training, here, sampling, there):
        common = overlaps(entry.source, entry.target)
        a, b = entry.source.index[sources], entry.target.index[targets]
        both = np.outer(a >= 0, b >= 0)
        sums += np.where(both, common[np.maximum(a, 0)][:, np.maximum(b, 0)], 0.0) * entry.num_bytes
    return np.rint(sums)
