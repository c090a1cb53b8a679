"""Which rows of a batch are of one sample: its trajectories, where an agent loop returned several.

They are adjacent, the last one has the sample's score, and the column ``trajectory_number`` tells them apart. Without
the column every row is a sample, and values per row are values per sample. Shapes: B rows, S samples, T tokens
of a response, W of the longest sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.protocol.fields import SHARES, TRAJECTORY_NUMBER, declared_field
from verl.protocol.lazy import zero_rows


def sample_numbers(batch: DataProto) -> np.ndarray | None:
    """(B,) int: the sample of each row, 0 .. S - 1; None where each row is one."""
    column = batch.non_tensor_batch.get(TRAJECTORY_NUMBER)
    if column is None:
        return None
    return np.cumsum([not number for number in column]) - 1  # None: of a chunk whose samples are one row each


def last_rows(batch: DataProto) -> DataProto:
    """The row of each sample that has its score, which is a sample again."""
    samples = sample_numbers(batch)
    if samples is not None:
        batch = batch.select_idxs(_last_of(samples))
        del batch.non_tensor_batch[TRAJECTORY_NUMBER]
    return batch


def _last_of(samples: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(samples, append=samples[-1:] + 1))


def per_sample(batch: DataProto, values: Tensor) -> Tensor:
    """(B,) -> (S,): the sum over the rows of each sample."""
    samples = sample_numbers(batch)
    if samples is None:
        return values
    ids = torch.from_numpy(samples)
    return values.new_zeros(int(samples[-1]) + 1).index_add(0, ids, values)


def shared(batch: DataProto, values: Tensor) -> Tensor:
    """(B,) -> (B,): the same sum at each row of the sample."""
    samples = sample_numbers(batch)
    return values if samples is None else per_sample(batch, values)[torch.from_numpy(samples)]


def mask_repeated(mini_batch: DataProto, rows: Sequence[int]) -> None:
    """Mask the rows that only fill up the ranks: no loss, metric or denominator counts them.

    Args:
        rows: (b,) where each was in the batch; those that fill up are a row once more.
    """
    is_repeated = np.ones(len(rows), dtype=bool)
    is_repeated[np.unique(rows, return_index=True)[1]] = False
    if is_repeated.any():
        mini_batch.tensors["response_mask"] = zero_rows(mini_batch.tensors["response_mask"], is_repeated)


def as_sequences(mini_batch: DataProto, rows: Sequence[int], samples: np.ndarray) -> None:
    """Add ``sequence_shares`` (b,), by which a sample counts once.

    Args:
        mini_batch: all rows of each of its samples; those that fill up the ranks are masked.
        rows: (b,) where each was in the batch.
        samples: (B,) of the rows of the batch.
    """
    ids = torch.from_numpy(samples[list(rows)])
    tokens = mini_batch.tensors["response_mask"].bool().sum(-1).double()
    totals = tokens.new_zeros(int(samples[-1]) + 1).index_add(0, ids, tokens)
    mini_batch.tensors[SHARES] = (tokens / totals[ids].clamp(min=1)).float()


@dataclass(frozen=True)
class OneRowEach:
    """The tokens of a sample as one row, its trajectories one after the other: what an advantage estimator sees.

    Args:
        there: (B, T) bool, the tokens of the responses, inserted ones included.
        rows, columns: (N,) of each of these N tokens: its sample, and its place there.
        samples: (B,) the sample of each row.
    """

    there: Tensor
    rows: Tensor
    columns: Tensor
    samples: np.ndarray

    @classmethod
    def of(cls, batch: DataProto) -> OneRowEach | None:
        """None where each row is a sample, or there is none."""
        samples = sample_numbers(batch)
        if samples is None or not len(samples):
            return None
        ids, width = torch.from_numpy(samples), batch.tensors["responses"].shape[-1]
        lengths = batch.tensors["attention_mask"][:, -width:].sum(-1).clamp(min=1)
        ends = lengths.cumsum(0)
        first = torch.from_numpy(np.searchsorted(samples, samples))
        starts = (ends - lengths) - (ends - lengths)[first]
        places = torch.arange(width)
        there = places < lengths[:, None]
        return cls(there, ids[:, None].expand_as(there)[there], (starts[:, None] + places)[there], samples)

    def batch(self, batch: DataProto) -> DataProto:
        """(B, T) -> (S, W), the other columns of each sample's last row; what has prompts in it is left out."""
        last = batch.select_idxs(_last_of(self.samples))
        tensors: dict[str, Tensor] = {}
        for name in batch.tensors.keys():
            field = declared_field(name)
            if field is None or field.time_axis is None:
                tensors[name] = last.tensors[name]
            elif field.time_symbol == "T":
                column = batch.tensors[name]
                joined = column.new_zeros(len(last), int(self.columns.max()) + 1, *column.shape[2:])
                joined[self.rows, self.columns] = column[self.there]
                tensors[name] = joined
        return DataProto.from_dict(tensors=tensors, non_tensors=last.non_tensor_batch, meta_info=last.meta_info)

    def parted(self, values: Tensor) -> Tensor:
        """(S, W) -> (B, T), 0 where no token is."""
        rows = values.new_zeros(self.there.shape)
        rows[self.there] = values[self.rows, self.columns]
        return rows
