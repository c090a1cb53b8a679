"""Sequences packed into a single row of tokens, and the attention calls that they need.

A packed row has no padding: T tokens, each of exactly one segment. A segment may follow another one (the responses to a
prompt follow it), so that a prompt is in the row once however many responses it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

NO_PREFIX = -1
PADDING_LIMIT = 1.25
"""Segments share one attention call while its cells are at most that many times their tokens (short ones: always)."""
SHORT = 32
WORTH_A_CALL = 128
"""Peers of one length with that many tokens get a call of their own, which takes them without copying."""


class Grid:
    """Some token ranges of a packed row as the B x L cells of one attention call; behind a range its cells are padding.

    Args:
        starts, lengths: the ranges.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device | str):
        first, row_lengths = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        self.rows, self.columns = len(first), int(row_lengths.max())
        full = int(row_lengths.min()) == self.columns
        self._range = slice(int(first[0]), int(first[0]) + self.rows * self.columns)
        self.padding: Tensor | None = None
        self._index: Tensor | None = None
        if full and (np.diff(first) == self.columns).all():
            return
        column = np.arange(self.columns)
        real = column < row_lengths[:, None]
        index = np.where(real, first[:, None] + column, first[:, None])
        self._index = torch.from_numpy(index.ravel()).to(device)
        self._tokens = torch.from_numpy(index[real]).to(device)
        self._cells = torch.from_numpy(np.flatnonzero(real)).to(device)
        if not full:
            self.padding = torch.from_numpy(~real).to(device)

    def take(self, values: Tensor) -> Tensor:
        """(T, ...) -> (B, L, ...); a padding cell repeats the first token of its range."""
        cells = values[self._range] if self._index is None else values.index_select(0, self._index)
        return cells.unflatten(0, (self.rows, self.columns))

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write (B, L, ...) into (T, ...), padding left out."""
        flat = values.flatten(0, 1)
        if self._index is None:
            target[self._range] = flat
        else:
            target.index_copy_(0, self._tokens, flat.index_select(0, self._cells).to(target.dtype))

    def add(self, target: Tensor, values: Tensor) -> None:
        """Add (B, L, ...) to (T, ...), padding left out."""
        flat = values.flatten(0, 1)
        if self._index is None:
            target[self._range].add_(flat)
        else:
            target.index_add_(0, self._tokens, flat.index_select(0, self._cells).to(target.dtype))


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a packed row lie.

    Args:
        lengths: tokens per segment, in the order of the row; each at least 1.
        prefix: per segment the number of the segment that it follows, or `NO_PREFIX`. A prefix has none itself and
            comes before its followers, which lie side by side.
        device: of the tokens.

    Example:
        >>> Segments((3, 2, 4), (NO_PREFIX, 0, 0), "cpu")  # one prompt of 3 tokens, responses of 2 and 4
    """

    lengths: tuple[int, ...]
    prefix: tuple[int, ...]
    device: torch.device | str = "cpu"

    @classmethod
    def separate(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Segments:
        """Sequences that share nothing."""
        return cls(tuple(lengths), (NO_PREFIX,) * len(lengths), device)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(int(x) for x in np.concatenate(([0], np.cumsum(self.lengths[:-1]))))

    def context(self, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """The token ranges of the sequence of token ``first`` up to ``end``, those of a prefix included."""
        number = bisect_right(self.starts, first) - 1
        before, last = self.prefix[number], (self.starts[number], end)
        return (last,) if before == NO_PREFIX else ((self.starts[before], self.starts[before + 1]), last)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def longest_context(self) -> int:
        """Tokens that the last token of the longest sequence sees, itself included."""
        return max(n + (self.lengths[p] if p != NO_PREFIX else 0) for n, p in zip(self.lengths, self.prefix))

    @cached_property
    def followers(self) -> dict[int, tuple[int, int]]:
        """Prefix -> (first token, number of tokens) of all that follow it."""
        followers: dict[int, tuple[int, int]] = {}
        for number, before in enumerate(self.prefix):
            if before != NO_PREFIX:
                first, count = followers.get(before, (self.starts[number], 0))
                followers[before] = (first, count + self.lengths[number])
        return followers

    @cached_property
    def position_ids(self) -> Tensor:
        """(1, T): from 0 in every sequence, going on behind a prefix."""
        parts = [np.arange(n) + (self.lengths[p] if p != NO_PREFIX else 0) for n, p in zip(self.lengths, self.prefix)]
        return torch.from_numpy(np.concatenate(parts))[None].to(self.device)

    @cached_property
    def grids(self) -> list[Grid]:
        """The calls in which every segment attends to itself, causally."""
        even = [run for run in self._runs if len(run) > 1 and len(run) * self.lengths[run[0]] >= WORTH_A_CALL]
        others = set(range(len(self.lengths))).difference(*even)
        return [self._grid(numbers) for numbers in (*even, *by_length(others, self.lengths))]

    @cached_property
    def _runs(self) -> list[list[int]]:
        """Peers of one length, which lie in the row as in a call."""
        return [list(run) for _, run in groupby(range(len(self.lengths)), key=lambda i: self.lengths[i])]

    @cached_property
    def as_batches(self) -> tuple[list[Tensor], Tensor]:
        """The sequences, each with its prefix in front, as rows of batches, for layers that carry a state.

        Returns:
            (B, L) tokens of each batch, rows of about one length; what fills up a row repeats its first token. And (T,)
            the cell of each token in all batches; a prefix token's is in the first row that begins with the prefix.
        """
        ranges = [np.arange(start, start + n) for start, n in zip(self.starts, self.lengths)]
        ends = [i for i in range(len(ranges)) if i not in self.followers]
        rows = {i: np.concatenate([ranges[p] for p in (self.prefix[i], i) if p != NO_PREFIX]) for i in ends}
        lengths = [len(rows.get(i, ())) for i in range(len(ranges))]
        batches, cells, before = [], np.full(self.num_tokens, -1), 0
        for numbers in by_length(ends, lengths):
            longest = lengths[numbers[0]]
            batch = np.stack([np.pad(rows[i], (0, longest - lengths[i]), constant_values=rows[i][0]) for i in numbers])
            for row, i in enumerate(numbers):
                free = cells[rows[i]] < 0
                cells[rows[i][free]] = before + row * longest + np.flatnonzero(free)
            batches.append(torch.from_numpy(batch).to(self.device))
            before += batch.size
        return batches, torch.from_numpy(cells).to(self.device)

    @cached_property
    def to_prefix(self) -> list[tuple[Grid, Grid]]:
        """The calls (queries, keys) in which all followers of a prefix attend to the whole of it.

        One call per length of prefix; of queries padding is harmless, so they may differ in number.
        """
        by_length: dict[int, list[int]] = {}
        for before in self.followers:
            by_length.setdefault(self.lengths[before], []).append(before)
        calls = []
        for length, prefixes in by_length.items():
            keys = Grid([self.starts[p] for p in prefixes], [length] * len(prefixes), self.device)
            ranges = [self.followers[p] for p in prefixes]
            queries = Grid([first for first, _ in ranges], [count for _, count in ranges], self.device)
            calls.append((queries, keys))
        return calls

    def _grid(self, numbers: list[int]) -> Grid:
        if len({self.lengths[i] for i in numbers}) == 1:
            numbers = sorted(numbers)  # adjacent sequences need no index
        return Grid([self.starts[i] for i in numbers], [self.lengths[i] for i in numbers], self.device)


def by_length(numbers: Iterable[int], lengths: Sequence[int]) -> list[list[int]]:
    """Rows of about one length together, the longest first."""
    groups: list[list[int]] = []
    longest = tokens = 0
    for number in sorted(numbers, key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        cells = longest * (len(groups[-1]) + 1) if groups else 0
        if not groups or (longest > SHORT and cells > PADDING_LIMIT * (tokens + length)):
            groups.append([])
            longest, tokens = length, 0
        groups[-1].append(number)
        tokens += length
    return groups
