"""Splitting rows into parts of equal work.

Ranks that train together wait for the slowest one, so every rank of a mini-batch should get as much work as the others.
`partition` is what the library uses: split the rows from the longest to the shortest, then exchange pairs between
heavy and light parts until the heaviest is near the lower bound (8192 rows on 128 ranks: a few milliseconds).
Everything here is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from verl.errors import ConfigError

WORK_PER_TOKEN = 24576
"""Linear work per token in units of the work of attention per pair: 6 x hidden size, for hidden size 4096."""

TOLERANCE = 1e-4
SEARCH_BUDGET = 8_000_000
"""Candidate exchanges looked at before a partition is good enough: tens of milliseconds at most."""


def calculate_workload(seqlen_list: Sequence[int] | np.ndarray) -> np.ndarray:
    """(n,) int64: the relative compute of a sequence of each length, ``24576 * n + n^2``."""
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    return WORK_PER_TOKEN * lengths + lengths**2


def lower_bound(costs: Sequence[int] | np.ndarray, k: int, equal_size: bool = True) -> float:
    """No partition has a lighter heaviest part: the mean, or the largest cost with the smallest company it can have."""
    costs = np.sort(np.asarray(costs))
    company = costs[: len(costs) // k - 1].sum() if equal_size else 0
    return max(float(costs.sum()) / k, float(costs[-1] + company))


def partition(costs: Sequence[int] | np.ndarray, k: int, equal_size: bool) -> list[list[int]]:
    """Split n items into k parts so that the heaviest is as light as this search finds.

    Args:
        costs: (n,) non-negative numbers.
        equal_size: every part gets exactly n / k items.

    Returns:
        k non-empty lists of indices, each ascending.
    """
    work = np.asarray(costs, dtype=np.float64)
    _check_parts(len(work), k, equal_size)
    part_of = _split_equally(work, k) if equal_size else _longest_first(work, k)
    _exchange(work, part_of, k, may_move=not equal_size, goal=lower_bound(work, k, equal_size) * (1 + TOLERANCE))
    return [np.flatnonzero(part_of == part).tolist() for part in range(k)]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """`partition` of lengths (or of any costs) under upstream's name."""
    return partition(seqlen_list, k_partitions, equal_size)


karmarkar_karp = greedy_partition = get_seqlen_balanced_partitions
"""Upstream's names of two methods, whose heaviest part is 11 to 24 % above the bound for log-normal lengths in equal
counts, where that of `partition` is 0.01 %: they give `partition`, too."""


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Hashable], k_partitions: int
) -> list[list[int]]:
    """Balanced parts in which the rows of one uid stay together.

    Groups are split in equal numbers where they are equally large and divide evenly, freely otherwise.
    """
    groups = members_of(uid_list)
    work = calculate_workload(seqlen_list)
    costs = [int(work[rows].sum()) for rows in groups]
    equal = len({len(rows) for rows in groups}) == 1 and len(groups) % k_partitions == 0
    parts = partition(costs, k_partitions, equal_size=equal)
    return [sorted(row for group in part for row in groups[group]) for part in parts]


def members_of(keys: Iterable[Hashable]) -> list[list[int]]:
    """The row indices of each key, keys in the order of their first row."""
    by_key: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        by_key.setdefault(key, []).append(row)
    return list(by_key.values())


def balance_within_mini_batches(
    lengths: Sequence[int] | np.ndarray,
    mini_batch_rows: int,
    num_ranks: int,
    use_workload: bool = True,
    group_ids: Sequence[Hashable] | None = None,
) -> list[int]:
    """The order in which rows are sent, so that every rank has equal work in every mini-batch.

    A mini-batch is ``mini_batch_rows`` consecutive rows (the last one may be shorter): its members are the same for any
    number of ranks, only who computes them changes. Each rank gets one contiguous piece of the returned order, in
    which its shares of the first, second, ... mini-batch follow each other.

    Args:
        lengths: (n,) tokens per row.
        use_workload: balance the compute (with attention) and not the token count.
        group_ids: (n,) rows with the same id go to one rank (which computes their prompt once), in mini-batches whose
            groups are equally large and can be split in equal numbers; elsewhere single rows are split.

    Returns:
        A permutation of the row indices.
    """
    costs = calculate_workload(lengths) if use_workload else np.asarray(lengths, dtype=np.int64)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(costs), mini_batch_rows):
        piece = costs[start : start + mini_batch_rows]
        if len(piece) % num_ranks:
            raise ConfigError(
                f"a mini-batch of {len(piece)} rows cannot be split evenly over {num_ranks} data-parallel ranks",
                key="actor_rollout_ref.actor.ppo_mini_batch_size",
                got=len(piece),
                allowed=f"a multiple of {num_ranks} rows (prompts x actor_rollout_ref.rollout.n)",
            )
        units = _whole_groups(group_ids[start : start + len(piece)], num_ranks) if group_ids is not None else None
        units = units or [[row] for row in range(len(piece))]
        unit_costs = [int(piece[unit].sum()) for unit in units]
        for rank, part in enumerate(partition(unit_costs, num_ranks, equal_size=True)):
            shares[rank].extend(start + row for unit in part for row in units[unit])
    return [row for share in shares for row in share]


def _whole_groups(group_ids: Sequence[Hashable], num_ranks: int) -> list[list[int]] | None:
    """The rows of each group, None where whole groups cannot give every rank as many rows as the others."""
    groups = members_of(group_ids)
    fits = len({len(rows) for rows in groups}) == 1 and len(groups) % num_ranks == 0
    return groups if fits else None


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens per rank: of contiguous pieces (``min``, ``max``, ``minmax_diff``), of ``partitions`` (``balanced_*``)."""
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    before = [int(piece.sum()) for piece in np.array_split(lengths, len(partitions))]
    after = [int(lengths[list(part)].sum()) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": float(lengths.sum()) / len(partitions),
    }


def _check_parts(num_items: int, k: int, equal_size: bool) -> None:
    if not 1 <= k <= num_items:
        raise ConfigError(f"{num_items} rows cannot be split into {k} non-empty parts")
    if equal_size and num_items % k:
        raise ConfigError(f"{num_items} rows cannot be split into {k} parts of equal size")


def _split_equally(costs: np.ndarray, k: int) -> np.ndarray:
    """Rounds of k items from the largest to the smallest; in a round the lightest part gets the largest item."""
    order = np.argsort(-costs, kind="stable")
    part_of, sums = np.empty(len(costs), dtype=np.int64), np.zeros(k)
    for start in range(0, len(costs), k):
        items = order[start : start + k]
        lightest_first = np.argsort(sums, kind="stable")
        part_of[items] = lightest_first
        sums[lightest_first] += costs[items]
    return part_of


def _longest_first(costs: np.ndarray, k: int) -> np.ndarray:
    """Each item from the largest to the smallest to the lightest part, empty parts first."""
    part_of = np.empty(len(costs), dtype=np.int64)
    parts = [(0.0, 0, part) for part in range(k)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, count, part = parts[0]
        part_of[item] = part
        heapq.heapreplace(parts, (total + float(costs[item]), count + 1, part))
    return part_of


def _exchange(costs: np.ndarray, part_of: np.ndarray, k: int, may_move: bool, goal: float) -> None:
    """Lighten the heaviest part, in place, until it reaches ``goal`` or no single exchange helps.

    The lightest part is the first candidate to exchange with, because that search is small; all parts come second.
    With ``may_move`` an item may also go without another coming back.
    """
    sums = np.bincount(part_of, weights=costs, minlength=k)
    budget = SEARCH_BUDGET
    while budget > 0:
        heavy = int(sums.argmax())
        if sums[heavy] <= goal:
            return
        mine = np.flatnonzero(part_of == heavy)
        exchange = None
        for others in (np.flatnonzero(part_of == sums.argmin()), np.flatnonzero(part_of != heavy)):
            if exchange is None:
                budget -= len(mine) * (len(others) + k)
                exchange = _best_exchange(costs, part_of, sums, mine, others, may_move)
        if exchange is None:
            return
        item, partner, target = exchange
        gain = costs[item] - (costs[partner] if partner is not None else 0.0)
        part_of[item] = target
        if partner is not None:
            part_of[partner] = heavy
        sums[heavy] -= gain
        sums[target] += gain


def _best_exchange(
    costs: np.ndarray, part_of: np.ndarray, sums: np.ndarray, mine: np.ndarray, others: np.ndarray, may_move: bool
) -> tuple[int, int | None, int] | None:
    """The item, its partner (None: it only moves) and the target part that leave the heavier of the two lightest."""
    now = float(sums[part_of[mine[0]]])
    their_costs, their_parts = costs[others], part_of[others]
    if may_move:
        targets = np.unique(their_parts)
        their_costs = np.concatenate([their_costs, np.zeros(len(targets))])
        their_parts = np.concatenate([their_parts, targets])
    gain = costs[mine][:, None] - their_costs[None, :]
    after = np.maximum(now - gain, sums[their_parts][None, :] + gain)
    best = int(after.argmin())
    row, column = divmod(best, after.shape[1])
    if not after[row, column] < now * (1 - 1e-9):
        return None
    partner = int(others[column]) if column < len(others) else None
    return int(mine[row]), partner, int(their_parts[column])
