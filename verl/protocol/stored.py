"""Where the entries of a column are: in blocks of rows that lie elsewhere, or implied by one number per row.

A plan knows shape, type and rows of a (B, T, ...) column without its entries. Rows are selected, parts of the time axis
cut and batches joined on the plan alone; `value` fetches the blocks that the remaining rows need. What the controller
asks of a column most often, its row sums and bounds, is computed where the column is made and travels with the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.errors import WorkerError
from verl.protocol import traffic
from verl.protocol.fields import Field, PaddingValue, declared_field
from verl.protocol.references import resolve

BLOCK_BYTES = 4 << 20
"""About the size of a block: a rank that needs a few rows fetches little else, and there are few references."""
REFERENCE_BYTES = 100
"""About what a reference to a block takes in a message, with the block's name and node."""
ZEROS = -1
"""Stands for a block in `Stored.where`: the row is zero everywhere."""
Index = slice | np.ndarray
Edit = tuple[Any, ...]
"""``("cut", axis, start, length)`` or ``("pad", axis, left, right, value)``."""


@dataclass(eq=False)
class Block:
    """Some rows of one column, in the store of the node where they were made.

    Args:
        column: its name.
        reference: the runtime's, for `resolve`.
        num_bytes: of the rows.
        place: the node, for messages.
    """

    column: str
    reference: Any
    num_bytes: int
    place: str
    rows: Tensor | None = field(default=None, repr=False)
    """The entries, once this process has fetched them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (self.column, self.reference, self.num_bytes, self.place)


def fetch(blocks: Iterable[Block]) -> None:
    """Fetch what this process does not have yet, all at once; the bytes are counted by column.

    Raises:
        WorkerError: a block is lost; it names the column and the node.
    """
    missing = [block for block in blocks if block.rows is None]
    missing = list({id(block): block for block in missing}.values())
    if not missing:
        return
    try:
        values = resolve([block.reference for block in missing])
    except WorkerError as error:
        raise _lost(missing, error) from error
    for block, rows in zip(missing, values, strict=True):
        block.rows = rows
        traffic.count(f"fetched/{block.column}", block.num_bytes)


def _lost(blocks: Sequence[Block], error: WorkerError) -> WorkerError:
    """The error for the first of these blocks that cannot be fetched by itself."""
    for block in blocks:
        try:
            resolve([block.reference])
        except WorkerError as reason:
            return WorkerError(
                f"{block.num_bytes / 1e6:.1f} MB of the column {block.column!r} are lost: they were in the object "
                f"store of the node {block.place}, and {reason.message}",
                key="transfer_queue.enable",
                fix="Restart the run: it resumes from its last checkpoint, which has what it needs. If the node ran "
                "out of memory, give Ray more (ray_kwargs.ray_init.object_store_memory) or take smaller batches.",
            )
    return error


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of the rows of a column (B, L) without its entries.

    Args:
        sums: (B, 2) of the entries before `Stored.split` and from there on; int64, or float64 for a column of floats.
        highest: (B,) the largest entry.
        lowest: (B,) the smallest entry that is not negative; the type's largest number where there is none.
        last: (B,) the place of the last entry that is not zero, -1 where there is none.
        is_mask: all entries are 0 or 1.
    """

    sums: Tensor
    highest: Tensor | None = None
    lowest: Tensor | None = None
    last: Tensor | None = None
    is_mask: bool = False

    @classmethod
    def of(cls, column: Tensor, split: int) -> Facts:
        """Of a column that is here."""
        if column.is_floating_point():
            return cls(_sums(column.double(), split))
        high = torch.iinfo(column.dtype).max if column.dtype != torch.bool else 1
        numbers = column.long()
        empty = numbers.shape[1] == 0
        places = torch.arange(1, numbers.shape[1] + 1)
        return cls(
            sums=_sums(numbers, split),
            highest=None if empty else numbers.amax(-1),
            lowest=None if empty else torch.where(numbers >= 0, numbers, high).amin(-1),
            last=None if empty else (numbers.ne(0) * places).amax(-1) - 1,
            is_mask=bool(((numbers == 0) | (numbers == 1)).all()),
        )

    @property
    def num_bytes(self) -> int:
        facts = (fact for fact in (self.sums, self.highest, self.lowest, self.last) if fact is not None)
        return sum(fact.numel() * fact.element_size() for fact in facts)

    def map(self, change: Callable[[Tensor], Tensor]) -> Facts:
        """The same facts, each tensor changed."""
        highest, lowest, last = (
            None if fact is None else change(fact) for fact in (self.highest, self.lowest, self.last)
        )
        return Facts(change(self.sums), highest, lowest, last, self.is_mask)

    @staticmethod
    def joined(parts: Sequence[Facts | None]) -> Facts | None:
        """Of the rows of all parts; None where one of them has none."""
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return None

        def cat(name: str) -> Tensor | None:
            facts = [getattr(part, name) for part in present]
            return None if any(fact is None for fact in facts) else torch.cat(facts)

        return Facts(torch.cat([part.sums for part in present]), cat("highest"), cat("lowest"), cat("last"),
                     is_mask=all(part.is_mask for part in present))  # fmt: skip


def _sums(numbers: Tensor, split: int) -> Tensor:
    return torch.stack([numbers[:, :split].sum(-1), numbers[:, split:].sum(-1)], dim=1)


@dataclass(frozen=True, eq=False)
class Stored:
    """Rows of blocks.

    Args:
        where: (B, 2) int32, each row's block (or `ZEROS`) and its place there.
        edits: of each block, in order, after its rows were selected.
        facts: None where the controller never asks for them.
        split: where the response begins in a column over prompt and response; else 0.
    """

    blocks: tuple[Block, ...]
    where: np.ndarray
    shape: tuple[int, ...]
    dtype: torch.dtype
    edits: tuple[tuple[Edit, ...], ...]
    facts: Facts | None = None
    split: int = 0

    def needs(self) -> tuple[Block, ...]:
        """The blocks that `value` reads."""
        return self.blocks

    @property
    def num_bytes(self) -> int:
        """About what the plan itself takes in a message."""
        facts = 0 if self.facts is None else self.facts.num_bytes
        return self.where.nbytes + facts + REFERENCE_BYTES * len(self.blocks)

    def take(self, index: Index) -> Stored:
        """These rows, in this order."""
        where, facts = self.where[index], self.facts
        if facts is not None:
            rows = index if isinstance(index, slice) else torch.from_numpy(index)
            facts = facts.map(lambda fact: fact[rows])
        taken = replace(self, where=where, shape=(len(where), *self.shape[1:]), facts=facts)
        return taken._without_unread_blocks()

    def _without_unread_blocks(self) -> Stored:
        if len(self.blocks) < 2:
            return self
        numbers = self.where[:, 0]
        if len(numbers) and numbers[0] != ZEROS and (numbers == numbers[0]).all():  # a rank's few rows, as a rule
            only, where = int(numbers[0]), self.where.copy()
            where[:, 0] = 0
            return replace(self, blocks=(self.blocks[only],), edits=(self.edits[only],), where=where)
        is_read = np.bincount(self.where[:, 0] + 1, minlength=len(self.blocks) + 1)[1:] > 0
        if is_read.all():
            return self
        number = np.concatenate([[ZEROS], np.cumsum(is_read) - 1]).astype(np.int32)
        where = np.stack([number[self.where[:, 0] + 1], self.where[:, 1]], axis=1)
        read_blocks = np.flatnonzero(is_read)
        return replace(
            self,
            blocks=tuple(self.blocks[i] for i in read_blocks),
            edits=tuple(self.edits[i] for i in read_blocks),
            where=where,
        )

    def without(self, rows: np.ndarray) -> Stored:
        """The same with zeros in these rows (B,) bool."""
        where = self.where.copy()
        where[rows] = (ZEROS, 0)
        facts = None
        if self.facts is not None:
            out = torch.from_numpy(rows)
            facts = Facts(torch.where(out[:, None], 0, self.facts.sums), is_mask=self.facts.is_mask)
            if self.facts.last is not None:
                facts = replace(facts, last=torch.where(out, -1, self.facts.last))
        return replace(self, where=where, facts=facts)._without_unread_blocks()

    def scattered(self, rows: np.ndarray, total: int) -> Stored:
        """``total`` rows, of which those of number ``rows`` (B,) are these and the others are zero."""
        where = np.full((total, 2), (ZEROS, 0), dtype=np.int32)
        where[rows] = self.where
        facts = None
        if self.facts is not None:
            sums = self.facts.sums.new_zeros(total, 2)
            sums[torch.from_numpy(rows)] = self.facts.sums
            facts = Facts(sums, is_mask=self.facts.is_mask)
        return replace(self, where=where, shape=(total, *self.shape[1:]), facts=facts)

    def cut(self, axis: int, start: int, length: int, only_padding: bool = False) -> Stored:
        """``length`` entries of an axis from ``start`` on.

        Args:
            only_padding: what is cut off is known to be padding, so sums stay what they are.
        """
        axis, width, facts, split = axis % len(self.shape), self.shape[axis], None, 0
        if self.facts is not None and axis == 1:
            ours, rest = self.facts.sums.unbind(1)
            nothing = torch.zeros_like(ours)
            if only_padding or (start, length) == (0, width):
                facts, split = replace(self.facts, last=None), max(0, self.split - start)
            elif (start, length) == (0, self.split):
                facts = Facts(torch.stack([nothing, ours], dim=1), is_mask=self.facts.is_mask)
            elif (start, start + length) == (self.split, width):
                facts = Facts(torch.stack([nothing, rest], dim=1), is_mask=self.facts.is_mask)
        edited = tuple((*edits, ("cut", axis, start, length)) for edits in self.edits)
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return replace(self, shape=shape, edits=edited, facts=facts, split=split)

    def padded(self, axis: int, left: int, right: int, value: PaddingValue) -> Stored:
        """More entries of a declared padding value on both sides of an axis."""
        if not left and not right:
            return self
        axis = axis % len(self.shape)
        facts = self.facts
        if facts is not None and value == 0:
            facts = replace(facts, last=None if left else facts.last)
        elif facts is not None:  # of another value: what has been drawn keeps its bounds
            facts = Facts(facts.sums, facts.highest, facts.lowest) if value == -1 else None
        edited = tuple((*edits, ("pad", axis, left, right, value)) for edits in self.edits)
        shape = (*self.shape[:axis], self.shape[axis] + left + right, *self.shape[axis + 1 :])
        return replace(self, shape=shape, edits=edited, facts=facts, split=self.split + left if self.split else 0)

    def cast(self, dtype: torch.dtype) -> Stored | None:
        """The same numbers in another type; None where that would change what is known of them."""
        facts = self.facts
        if facts is not None and (dtype == torch.bool and not facts.is_mask):
            facts = None
        return replace(self, dtype=dtype, facts=facts)

    def row_sums(self) -> Tensor | None:
        """(B,) the exact sum of each row of a column of integers, or of float64; None where they are not known."""
        if self.facts is None or len(self.shape) != 2:
            return None
        exact = self.facts.sums.dtype == torch.int64 or self.dtype == torch.float64
        if not exact:
            return None
        total = self.facts.sums.sum(1)
        return total.to(self.dtype) if self.dtype.is_floating_point else total

    def amax(self) -> Tensor | None:
        return None if self.facts is None or self.facts.highest is None else self.facts.highest.to(self.dtype)

    def value(self) -> Tensor:
        """The entries. Memory that a single block shares with the store must not be written to.

        Raises:
            WorkerError: a block is lost.
        """
        fetch(self.blocks)
        if len(self.blocks) == 1 and self._is_all_of_a_block():
            return self._edited(0, self.blocks[0].rows).to(self.dtype)
        out = torch.zeros(self.shape, dtype=self.dtype)
        for number, block in enumerate(self.blocks):
            here = np.flatnonzero(self.where[:, 0] == number)
            there = self.where[here, 1]
            assert block.rows is not None
            rows = block.rows[_range_or_rows(there)]
            target = _range_or_rows(here)
            if isinstance(target, slice):
                out[target].copy_(self._edited(number, rows))
            else:
                out[target] = self._edited(number, rows).to(self.dtype)
        return out

    def _is_all_of_a_block(self) -> bool:
        rows = self.blocks[0].rows
        return (
            rows is not None
            and len(rows) == len(self.where)
            and not self.where[:, 0].any()
            and bool((self.where[:, 1] == np.arange(len(rows))).all())
        )

    def _edited(self, number: int, rows: Any) -> Tensor:
        for kind, axis, *how in self.edits[number]:
            rows = rows.narrow(axis, *how) if kind == "cut" else pad_axis(rows, axis, *how)
        return rows

    @staticmethod
    def joined(parts: Sequence[Stored]) -> Stored:
        """The rows of all parts; their other axes are of one size."""
        blocks: dict[tuple[int, tuple[Edit, ...]], int] = {}
        kept: list[Block] = []
        wheres = []
        for part in parts:
            numbers = [ZEROS]
            for block, edits in zip(part.blocks, part.edits):
                number = blocks.setdefault((id(block), edits), len(blocks))
                if number == len(kept):
                    kept.append(block)
                numbers.append(number)
            number_of = np.array(numbers, dtype=np.int32)[part.where[:, 0] + 1]
            wheres.append(np.stack([number_of, part.where[:, 1]], axis=1))
        where, first = np.concatenate(wheres), parts[0]
        splits = {part.split for part in parts}
        facts = Facts.joined([part.facts for part in parts]) if len(splits) == 1 else None
        return Stored(
            tuple(kept),
            where,
            (len(where), *first.shape[1:]),
            first.dtype,
            tuple(edits for _, edits in blocks),
            facts,
            first.split,
        )


def _range_or_rows(rows: np.ndarray) -> slice | Tensor:
    """A slice where the rows follow each other, so that selecting them copies nothing."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows.astype(np.int64))


def pad_axis(part: Tensor, axis: int, left: int, right: int, value: PaddingValue) -> Tensor:
    """More entries on both sides of an axis: of ``value``, or for "edge" of the outermost entry."""
    pieces = [part]
    for count, is_left in ((left, True), (right, False)):
        if count == 0:
            continue
        shape = list(part.shape)
        shape[axis] = count
        if value == "edge" and part.shape[axis]:
            padding = part.narrow(axis, 0 if is_left else part.shape[axis] - 1, 1).expand(shape)
        else:
            padding = part.new_full(shape, 0 if isinstance(value, str) else value)
        pieces.insert(0 if is_left else len(pieces), padding)
    return part if len(pieces) == 1 else torch.cat(pieces, dim=axis)


@dataclass(frozen=True, eq=False)
class PerRow:
    """A number per row where a mask is true, and ``outside`` elsewhere: what outcome estimators give each token.

    Args:
        numbers: (B,) of at most 32 bits.
        mask: (B, T).
        dtype: of the column; float64 holds the sum of a row exactly.
    """

    numbers: Tensor
    mask: Stored
    dtype: torch.dtype
    outside: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mask.shape

    def needs(self) -> tuple[Block, ...]:
        return self.mask.needs()

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size() + self.mask.num_bytes

    def take(self, index: Index) -> PerRow:
        rows = index if isinstance(index, slice) else torch.from_numpy(index)
        return replace(self, numbers=self.numbers[rows], mask=self.mask.take(index))

    def cast(self, dtype: torch.dtype) -> PerRow | None:
        wider = dtype.is_floating_point and torch.promote_types(self.dtype, dtype) == dtype
        return replace(self, dtype=dtype) if wider else None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PerRow:
        """Every entry changed by a function of single entries."""
        outside = change(torch.tensor(self.outside, dtype=self.numbers.dtype)).item()
        return replace(self, numbers=change(self.numbers), outside=outside)

    def scattered(self, rows: np.ndarray, total: int) -> PerRow:
        numbers = self.numbers.new_zeros(total)
        numbers[torch.from_numpy(rows)] = self.numbers
        return replace(self, numbers=numbers, mask=self.mask.scattered(rows, total))

    def row_sums(self) -> Tensor | None:
        counts = self.mask.row_sums()
        is_exact = self.dtype == torch.float64 and self.numbers.element_size() <= 4 and self.outside == 0
        if counts is None or not is_exact:
            return None
        return torch.where(counts > 0, self.numbers.double() * counts, 0.0)

    def extreme(self, pick: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        """(B,) the largest or smallest entry of each row, by `torch.maximum` or `torch.minimum`."""
        counts = self.mask.row_sums()
        if counts is None or not self.shape[1]:
            return None
        outside = torch.full_like(self.numbers, self.outside)
        both = torch.where(counts == self.shape[1], self.numbers, pick(self.numbers, outside))
        return torch.where(counts == 0, outside, both).to(self.dtype)

    def amax(self) -> Tensor | None:
        return self.extreme(torch.maximum)

    def value(self) -> Tensor:
        return torch.where(self.mask.value().bool(), self.numbers[:, None].to(self.dtype), self.outside)


@dataclass(frozen=True, eq=False)
class OneEntry:
    """One entry per row, zero elsewhere: scores of sequences.

    Args:
        numbers: (B,).
        places: (B,) int64, where it is; -1 in a row without one.
        width: T.
    """

    numbers: Tensor
    places: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.numbers), self.width

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def needs(self) -> tuple[Block, ...]:
        return ()

    @property
    def num_bytes(self) -> int:
        return self.numbers.numel() * self.numbers.element_size() + self.places.numel() * self.places.element_size()

    def take(self, index: Index) -> OneEntry:
        rows = index if isinstance(index, slice) else torch.from_numpy(index)
        return replace(self, numbers=self.numbers[rows], places=self.places[rows])

    def cast(self, dtype: torch.dtype) -> OneEntry | None:
        return self.mapped(lambda numbers: numbers.to(dtype))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> OneEntry:
        """Every entry changed by a function that leaves zero as it is."""
        return replace(self, numbers=change(self.numbers))

    def resized(self, left: int, width: int) -> OneEntry:
        """Among ``left`` more (or fewer) entries before, in a width of ``width``."""
        return replace(self, places=torch.where(self.places < 0, -1, self.places + left), width=width)

    def row_sums(self) -> Tensor | None:
        return torch.where(self.places < 0, 0, self.numbers) + 0.0  # a sum of zeros is never -0.0

    def amax(self) -> Tensor | None:
        return None

    def value(self) -> Tensor:
        out = torch.zeros(self.shape, dtype=self.dtype)
        rows = (self.places >= 0).nonzero().flatten()
        out[rows, self.places[rows]] = self.numbers[rows]
        return out

    @staticmethod
    def joined(parts: Sequence[OneEntry]) -> OneEntry:
        return OneEntry(
            torch.cat([part.numbers for part in parts]), torch.cat([part.places for part in parts]), parts[0].width
        )


Plan = Stored | PerRow | OneEntry


def store_column(
    name: str, column: Tensor, widths: Mapping[str, int], put: Callable[[Tensor], Any], place: str
) -> Stored:
    """Put a column (B, ...) away in blocks of rows.

    Args:
        widths: T of the batch, for columns over prompt and response.
        put: stores a tensor and returns its reference.
        place: this node.
    """
    column = column.detach().cpu()
    declared = declared_field(name)
    split = 0
    if declared is not None and declared.time_symbol == "P+T" and "T" in widths:
        split = column.shape[-1] - widths["T"]
    row_bytes = max(1, column[:1].numel() * column.element_size())
    each = max(1, BLOCK_BYTES // row_bytes)
    pieces = column.split(each) if len(column) else ()
    blocks = [Block(name, put(piece), piece.numel() * piece.element_size(), place) for piece in pieces]
    rows = np.arange(len(column), dtype=np.int32)
    facts = Facts.of(column, split) if column.dim() == 2 and _has_facts(column, declared) else None
    where = np.stack([rows // each, rows % each], axis=1)
    return Stored(tuple(blocks), where, tuple(column.shape), column.dtype, ((),) * len(blocks), facts, split)


def _has_facts(column: Tensor, declared: Field | None) -> bool:
    """Whether it is a mask, a version or a log-prob: token ids and complex columns have no sums."""
    if column.is_complex():
        return False
    return declared is not None and not isinstance(declared.padding_value, str)
