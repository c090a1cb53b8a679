"""Cutting a batch into mini-batches (what one optimizer step sees) and those into micro-batches (what fits in memory).

Mini-batches are formed globally and from the sample order, so their rows depend on nothing but the configuration.
Micro-batches are free: losses are normalised over the mini-batch, so any plan gives the same gradient. All plans are
lists of row indices; nothing touches a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from verl.algorithms.balancing import calculate_workload, members_of, partition
from verl.errors import ConfigError

Plan = list[list[int]]


def mini_batches(
    num_rows: int,
    mini_batch_size: int,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int | None = 0,
    together: int = 1,
) -> Plan:
    """The rows of every optimizer step of one update, epoch after epoch.

    Args:
        num_rows: rows of the whole batch, over all ranks.
        mini_batch_size: rows (not prompts) per optimizer step; see `rows_per_mini_batch`.
        shuffle: draw a new order of the rows for every epoch, from ``seed`` and the epoch alone.
        together: number of consecutive rows that stay consecutive, also when shuffled.

    Raises:
        ConfigError: the rows do not divide into such mini-batches.
    """
    if mini_batch_size < 1 or num_rows % mini_batch_size:
        raise ConfigError(
            f"a batch of {num_rows} rows does not divide into mini-batches of {mini_batch_size} rows",
            key="actor_rollout_ref.actor.ppo_mini_batch_size",
            fix="data.train_batch_size must be a multiple of ppo_mini_batch_size (both counted in prompts).",
        )
    steps: Plan = []
    for epoch in range(epochs):
        units = np.arange(num_rows).reshape(-1, together)
        order = (np.random.default_rng([seed or 0, epoch]).permutation(units) if shuffle else units).ravel()
        steps += [order[start : start + mini_batch_size].tolist() for start in range(0, num_rows, mini_batch_size)]
    return steps


def rows_per_mini_batch(ppo_mini_batch_size: int, samples_per_prompt: int) -> int:
    """``ppo_mini_batch_size`` counts prompts, each of which has ``rollout.n`` rows."""
    return ppo_mini_batch_size * samples_per_prompt


@dataclass(frozen=True)
class _Units:
    """What may not be cut: single rows, or whole groups of rows."""

    rows: list[list[int]]
    tokens: np.ndarray
    work: np.ndarray

    @classmethod
    def of(cls, lengths: Sequence[int], group_ids: Iterable[Hashable] | None) -> _Units:
        per_row = np.asarray(lengths, dtype=np.int64)
        work = calculate_workload(per_row)
        rows = [[row] for row in range(len(per_row))] if group_ids is None else members_of(group_ids)
        if sum(map(len, rows)) != len(per_row):
            raise ValueError(f"{sum(map(len, rows))} group ids for {len(per_row)} rows")
        tokens = np.array([per_row[unit].sum() for unit in rows], dtype=np.int64)
        return cls(rows, tokens, np.array([work[unit].sum() for unit in rows], dtype=np.int64))

    def join(self, parts: Iterable[Iterable[int]]) -> Plan:
        return [[row for unit in part for row in self.rows[unit]] for part in parts]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    group_ids: Iterable[Hashable] | None = None,
    min_count: int = 1,
    count_multiple: int = 1,
) -> Plan:
    """Split the rows of one rank into micro-batches.

    Give one limit: ``micro_batch_size`` takes consecutive rows, ``max_tokens`` packs rows into few
    micro-batches of about equal work, each within the budget. Without a limit all rows are one micro-batch.

    Args:
        lengths: (n,) tokens of each row.
        group_ids: (n,) rows with the same id stay in one micro-batch (a shared prompt is computed once).
        min_count: the least number of micro-batches (pipeline stages, or what another rank needs).
        count_multiple: their number is rounded up to a multiple of this (virtual pipeline stages).

    Returns:
        Lists of row indices; under a token budget ordered so that the ones with little work come first and last.

    Raises:
        ConfigError: both limits, a row or group beyond the limit, or fewer rows than ``min_count`` micro-batches.
    """
    if micro_batch_size is not None and max_tokens is not None:
        raise ConfigError(
            "a micro-batch is limited either by rows or by tokens",
            got={"micro_batch_size": micro_batch_size, "max_tokens": max_tokens},
            fix="Set use_dynamic_bsz=true for the token budget, false for the row count.",
        )
    units = _Units.of(lengths, group_ids)
    if not units.rows:
        return []
    if max_tokens is not None:
        return _by_tokens(units, max_tokens, min_count, count_multiple)
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ConfigError("must be at least 1", key="micro_batch_size", got=micro_batch_size)
    count = roundup_divisible(min_count, count_multiple)
    cuts = _by_rows(units, micro_batch_size or len(lengths))
    if len(cuts) < count or len(cuts) % count_multiple:
        count = roundup_divisible(max(count, len(cuts)), count_multiple)
        _check_count(count, len(units.rows))
        cuts = [part.tolist() for part in np.array_split(np.arange(len(units.rows)), count)]
    return units.join(cuts)


def agree_on_micro_batches(plan: Callable[[int], Plan], all_reduce_max: Callable[[int], int] | None = None) -> Plan:
    """A plan with the same number of micro-batches on every data-parallel rank, so that their collectives match.

    Args:
        plan: makes this rank's plan for a least number of micro-batches.
        all_reduce_max: the largest of a number over the ranks; None on a single rank.
    """
    count = 1
    while True:
        agreed = plan(count)
        largest = len(agreed) if all_reduce_max is None else all_reduce_max(len(agreed))
        # Every rank sees the same maximum, so all leave the loop together.
        if largest == count or all_reduce_max is None:
            return agreed
        count = largest


def restore_order(plan: Sequence[Sequence[int]]) -> list[int]:
    """The inverse permutation: ``torch.cat(outputs of the micro-batches)[restore_order(plan)]`` is in row order."""
    return inverse_permutation([row for micro_batch in plan for row in micro_batch])


def inverse_permutation(idx_map: Sequence[int]) -> list[int]:
    """The permutation that undoes ``idx_map``."""
    inverse = [0] * len(idx_map)
    for position, row in enumerate(idx_map):
        inverse[row] = position
    return inverse


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of b that is not below a."""
    return ceildiv(a, b) * b


def _by_rows(units: _Units, limit: int) -> list[list[int]]:
    cuts: list[list[int]] = []
    filled = limit
    for number, rows in enumerate(units.rows):
        if len(rows) > limit:
            raise ConfigError(
                f"a group of {len(rows)} rows that must stay together is larger than a micro-batch of {limit} rows",
                key="micro_batch_size",
                got=limit,
                allowed=f"at least {len(rows)}",
            )
        if filled + len(rows) > limit:
            cuts.append([])
            filled = 0
        cuts[-1].append(number)
        filled += len(rows)
    return cuts


def _by_tokens(units: _Units, max_tokens: int, min_count: int, count_multiple: int) -> Plan:
    longest = int(units.tokens.max())
    if longest > max_tokens:
        what = "sequence" if all(len(rows) == 1 for rows in units.rows) else "group of sequences that stays together"
        raise ConfigError(
            f"a {what} of {longest} tokens does not fit into the token budget of a micro-batch",
            key="max_token_len_per_gpu",
            got=max_tokens,
            allowed=f"at least {longest}",
        )
    count = roundup_divisible(max(min_count, ceildiv(int(units.tokens.sum()), max_tokens), 1), count_multiple)
    first_fit = functools.cache(lambda: _first_fit(units.tokens, max_tokens))
    while (parts := _parts_within(units, count, max_tokens, first_fit)) is None:
        count += count_multiple
    work = [int(units.work[part].sum()) for part in parts]
    ascending = sorted(range(len(parts)), key=work.__getitem__)
    return units.join(parts[i] for i in ascending[0::2] + ascending[1::2][::-1])


def _parts_within(
    units: _Units, count: int, max_tokens: int, first_fit: Callable[[], list[list[int]]]
) -> list[list[int]] | None:
    """A split into this number of parts, each within the budget, if one of three searches succeeds."""
    _check_count(count, len(units.rows))
    # Parts of equal work are best, but have unequal tokens; parts of equal tokens may fit where those do not.
    for costs in (units.work, units.tokens):
        parts = partition(costs, count, equal_size=False)
        if all(units.tokens[part].sum() <= max_tokens for part in parts):
            return parts
    # Where a few long rows fill each part, there is nothing to exchange between them.
    return first_fit() if len(first_fit()) == count else None


def _first_fit(tokens: np.ndarray, max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: each row, the longest first, into the first bin with room."""
    bins: list[list[int]] = []
    room = np.full(len(tokens), max_tokens, dtype=np.int64)
    for row in np.argsort(-tokens, kind="stable").tolist():
        target = int(np.argmax(room >= tokens[row]))
        if target == len(bins):
            bins.append([])
        bins[target].append(row)
        room[target] -= tokens[row]
    return bins


def _check_count(count: int, num_units: int) -> None:
    if count > num_units:
        raise ConfigError(
            f"{count} micro-batches are needed, but this rank has only {num_units} rows (or groups) to put into them",
            fix="Enlarge the mini-batch, or use fewer pipeline stages or ranks.",
        )
