"""Which rank takes which place in the sampling layout, so that as much as possible of what it holds stays.

Where the sampling sizes divide the training sizes the grouping of HybridFlow keeps everything. Elsewhere it is a
transportation problem between the distinct training places and the distinct sampling places, which a min-cost flow
solves exactly.
"""

from __future__ import annotations

from collections import defaultdict

import networkx as nx
import numpy as np

from verl.weight_sync.resharding.layout import Coordinates, Indices


def rank_classes(coordinates: Coordinates) -> tuple[list[Indices], Indices]:
    """Ranks that hold the same, as lists of ranks, and the class of every rank."""
    holds = np.stack([coordinates.tensor, coordinates.stage, coordinates.expert, coordinates.expert_tensor], axis=1)
    _, member = np.unique(holds, axis=0, return_inverse=True)
    member = member.reshape(-1)
    return [np.flatnonzero(member == number) for number in range(int(member.max()) + 1)], member


def matched(training: Coordinates, sampling: Coordinates, common: np.ndarray) -> Coordinates:
    """``sampling``, its places given to ranks so that they keep the most bytes.

    Args:
        common: (training classes, sampling classes) bytes that a rank of the one keeps in a place of the other, in the
            order of `rank_classes`.
    """
    ours, theirs = rank_classes(training)[0], rank_classes(sampling)[0]
    graph = nx.DiGraph()
    for i, ranks in enumerate(ours):
        graph.add_node(("rank", i), demand=-len(ranks))
    for j, places in enumerate(theirs):
        graph.add_node(("place", j), demand=len(places))
    for i in range(len(ours)):
        for j in range(len(theirs)):
            graph.add_edge(("rank", i), ("place", j), weight=-int(common[i, j]))
    _, flow = nx.network_simplex(graph)
    free = [list(places) for places in theirs]
    place_of = np.empty(len(training.tensor), dtype=np.int64)
    for i, ranks in enumerate(ours):
        waiting = list(ranks)
        counts = defaultdict(int, {j: count for (_, j), count in flow["rank", i].items()})
        for j in range(len(theirs)):
            for _ in range(counts[j]):
                place_of[waiting.pop(0)] = free[j].pop(0)
    return sampling.taken(place_of)
