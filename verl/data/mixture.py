"""Training prompts of several sources in a ratio (``data.source_weights``): an order like that of one source.

The schedule is that of proportionate progress (Baruah, Cohen, Plaxton, Varvel, Algorithmica 1996). The j-th prompt
(from 1) of a source with share w has its place in an epoch from floor((j - 1) / w) to ceil(j / w) - 1, and of those
that may be drawn the one with the earliest last place is. Among the first n prompts of an epoch each source has
floor(n w) or ceil(n w), for every n. Shares are fractions, and no rounding adds up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from verl.config.schema.data import fault_of_weights, fix_of_weights
from verl.data.columns import DATA_SOURCE
from verl.data.files import require_column
from verl.data.loader import EpochSampler
from verl.data.rl_dataset import RLHFDataset
from verl.data.settings import read, read_mapping
from verl.errors import ConfigError, DataError, suggest
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource

KEY = "data.source_weights"


@dataclass(frozen=True)
class Mixture:
    """The sources of a dataset that are drawn from, and the source of every place of an epoch.

    Args:
        names, shares: of the sources, in alphabetical order; shares are above 0 and sum to 1.
        items: the rows of each source, (n,) int64, as the dataset counts them.
        turns: (N,) int64, the number of the source at each place; N is the number of these rows.
        rows: ``__row__`` of the items of each source, (n,) int64.
    """

    names: tuple[str, ...]
    shares: tuple[Fraction, ...]
    items: tuple[np.ndarray, ...]
    turns: np.ndarray
    rows: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, dataset: object, config: SettingsSource) -> Mixture:
        """As ``data.source_weights`` says; without it the dataset is one source.

        Args:
            dataset: an `RLHFDataset`; any dataset with a length, where there are no weights.
            config: the ``data`` section.

        Raises:
            ConfigError: weights that are no shares, or a dataset without sources.
            DataError: a source without weight, a weight without rows or without a prompt of an epoch, a row without
                source.
        """
        weights = read_mapping(config, "source_weights")
        if not weights:
            every = np.arange(len(dataset))  # type: ignore[arg-type]  # a map-style dataset has a length
            rows = dataset.row_numbers if isinstance(dataset, RLHFDataset) else every
            return cls(("",), (Fraction(1),), (every,), np.zeros(len(every), dtype=np.int64), (rows,))
        if fault := fault_of_weights(weights):
            raise ConfigError(fault, key=KEY, got=weights, fix=fix_of_weights(weights))
        if not isinstance(dataset, RLHFDataset):
            name = type(dataset).__name__
            fix = "Derive the class from verl.data.RLHFDataset, or mix in a sampler (data.sampler.class_path)."
            raise ConfigError(f"{name} does not say of which source its rows are", key=KEY, got=weights, fix=fix)
        sources = np.array(_source_of_items(dataset, weights, str(read(config, "reward_fn_key", DATA_SOURCE))))
        _check_sources(Counter(sources.tolist()), weights)
        names = sorted(name for name, weight in weights.items() if weight > 0)
        total = sum(Fraction(str(weights[name])) for name in names)
        shares = tuple(Fraction(str(weights[name])) / total for name in names)
        items = tuple(np.flatnonzero(sources == name) for name in names)
        turns = fair_turns(shares, sum(map(len, items)))
        mixture = cls(tuple(names), shares, items, turns, tuple(dataset.row_numbers[of] for of in items))
        mixture._tell()
        return mixture

    def _tell(self) -> None:
        """A notice of what an epoch has of each source; a share of no prompt is a `DataError`."""
        counts, each = np.bincount(self.turns, minlength=len(self.names)).tolist(), list[str]()
        for name, share, count, items in zip(self.names, self.shares, counts, self.items):
            if not count:
                fault = f"an epoch of {len(self.turns)} prompts has none of source {name!r}"
                fix = f"Give it 1/{len(self.turns)} or more, or 0, which leaves its rows out."
                raise DataError(fault, key=KEY, got=f"{float(share):g}", fix=fix)
            each.append(f"{count} of {name} ({count / len(items):.3g} x its {len(items)} rows)")
        notice(KEY, f"an epoch of {len(self.turns)} prompts has {', '.join(each)}")

    def facts(self) -> list[list[object]]:
        """Name, share and number of rows of each source, as JSON values."""
        return [[name, str(share), len(items)] for name, share, items in zip(self.names, self.shares, self.items)]

    def count(self, rows: Iterable[int]) -> dict[str, int]:
        """How many of these rows, each a ``__row__``, are of each source."""
        listed = np.fromiter(rows, dtype=np.int64)
        return {name: int(np.isin(listed, there).sum()) for name, there in zip(self.names, self.rows)}


class MixtureSampler(EpochSampler):
    """The sources of a mixture in turns; an order that depends on (seed, epoch) and nothing else.

    Every source is passed again and again, over the ends of epochs too: in a new permutation, or in order. A row recurs
    only once all others of its source were drawn, as far as an epoch is not cut off by an incomplete batch.
    """

    def __init__(self, mixture: Mixture, *, shuffle: bool = True, seed: int | None = None):
        super().__init__(len(mixture.turns), shuffle=shuffle, seed=seed)
        self.mixture = mixture

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "sources": self.mixture.facts()}

    def __iter__(self) -> Iterator[int]:
        order = np.empty(self.num_rows, dtype=np.int64)
        for number, items in enumerate(self.mixture.items):
            places = np.flatnonzero(self.mixture.turns == number)
            order[places] = items[self._draws(number, len(items), len(places))]
        return iter(order.tolist())

    def _draws(self, source: int, rows: int, count: int) -> np.ndarray:
        """(count,) int64: which of the rows of a source this epoch has, in order."""
        first = self.epoch * count
        passes = [self._pass(source, number, rows) for number in range(first // rows, -(-(first + count) // rows))]
        return np.concatenate([np.arange(0), *passes])[first % rows :][:count]

    def _pass(self, source: int, number: int, rows: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(rows)
        return np.random.default_rng([self.seed, source, number]).permutation(rows)


def fair_turns(shares: Sequence[Fraction], count: int) -> np.ndarray:
    """(count,) int64: the number of the source at each place.

    Args:
        shares: above 0, of sum 1.
    """
    scale = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * scale) for share in shares]
    drawn, begins, ends = [0] * len(parts), [0] * len(parts), [-(-scale // part) for part in parts]
    turns = np.empty(count, dtype=np.int64)
    for place in range(count):
        turns[place] = source = min((end, number) for number, end in enumerate(ends) if begins[number] <= place)[1]
        drawn[source] += 1
        begins[source] = drawn[source] * scale // parts[source]
        ends[source] = -(-(drawn[source] + 1) * scale // parts[source])
    return turns


def _source_of_items(dataset: RLHFDataset, weights: Mapping[str, float], column: str) -> list[str]:
    """The source of every item: its file where the weights are of files, else the value of a column."""
    if set(weights) <= set(map(str, dataset.data_files)):
        if not dataset.has_rows_of_files:
            fault = f"{type(dataset).__name__} changed the number of rows, so a row has no file"
            raise ConfigError(fault, key=KEY, got=dict(weights), fix="Let the keys be values of data.reward_fn_key.")
        return [dataset.source_of(row)[0] for row in dataset.row_numbers.tolist()]
    names = dataset.dataframe.column_names
    require_column(column, names, file=", ".join(map(str, dataset.data_files)), key="data.reward_fn_key")
    values = list(dataset.dataframe[column])
    if None in values:
        fix = "Fill in the column, or let the keys of data.source_weights be the files of data.train_files."
        raise DataError(f"column {column!r} names no source", key=dataset.describe(values.index(None)), fix=fix)
    return list(map(str, values))


def _check_sources(rows: Mapping[str, int], weights: Mapping[str, float]) -> None:
    for name, number in rows.items():
        if name not in weights:
            fix = suggest(name, list(weights)) or "Give it a share; 0 leaves its rows out."
            raise DataError(f"{number} rows are of source {name!r}, which has no weight", key=KEY, got=weights, fix=fix)
    for name in weights:
        if name not in rows:
            fix = suggest(name, list(rows))
            raise DataError(f"no row is of source {name!r}", key=KEY, allowed=sorted(rows), fix=fix)
