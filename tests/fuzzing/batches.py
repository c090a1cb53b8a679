"""Random operations on batches against lists of dictionaries, from a seed; the suite runs some hundred of them.

    python -m tests.fuzzing.batches --operations 100000 --seed 0

A few batches exist at a time. An operation takes one or two of them and changes them in place or makes another. Then
all batches are compared with their oracles, so that a change in place which reaches a batch that shares memory is seen.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from verl.errors import BatchError
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

MOST_ROWS, MOST_BATCHES = 12, 5
WIDTHS = {"count": (), "pair": (2,), "grid": (4, 3)}
"""Name of a tensor column -> shape of an entry."""
COLUMNS = ("uid", "messages")
Row = dict[str, Any]


@dataclass
class Checked:
    """A batch, and its rows as the oracle has them: tensors as nested lists."""

    batch: DataProto
    rows: list[Row]

    def difference(self) -> str | None:
        held = rows_of(self.batch)
        if len(held) != len(self.rows):
            return f"{len(held)} rows instead of {len(self.rows)}"
        wrong = (f"row {n} is {a} instead of {b}" for n, (a, b) in enumerate(zip(held, self.rows)) if a != b)
        return next(wrong, None)


def rows_of(batch: DataProto) -> list[Row]:
    tensors = dict(batch.batch.items()) if batch.batch is not None else {}
    columns = {name: tensor.tolist() for name, tensor in tensors.items()}
    columns |= {name: list(column) for name, column in batch.non_tensor_batch.items()}
    return [{name: values[number] for name, values in columns.items()} for number in range(len(batch))]


@dataclass
class Batches:
    """The batches of one sequence of operations.

    Attributes:
        counts: operations by name.
    """

    random: Random
    held: list[Checked] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _fresh: itertools.count = field(default_factory=itertools.count)

    def step(self) -> None:
        """One random operation.

        Raises:
            AssertionError: a batch differs from its oracle; the message names the operation.
        """
        if not self.held:
            self.held.append(self.new(self.random.randint(0, 6)))
        operation = self.random.choice(OPERATIONS)
        made = operation(self, self.random.choice(self.held))
        self.counts[operation.__name__] += 1
        if made is not None and len(made.rows) <= MOST_ROWS:
            self.held.append(made)
        for checked in self.held:
            difference = checked.difference()
            assert difference is None, f"after {operation.__name__}: {difference}"
        self.random.shuffle(self.held)
        del self.held[MOST_BATCHES:]

    def new(self, size: int, names: tuple[str, ...] = (*WIDTHS, *COLUMNS), prefix: str = "") -> Checked:
        rows = [{prefix + name: self._value(name) for name in names} for _ in range(size)]
        tensors = {
            prefix + name: torch.tensor([row[prefix + name] for row in rows], dtype=torch.int64).reshape(
                size, *WIDTHS[name]
            )
            for name in names
            if name in WIDTHS
        }
        columns = {}
        for name in names:
            if name not in WIDTHS:
                columns[prefix + name] = np.empty(size, dtype=object)
                columns[prefix + name][:] = [row[prefix + name] for row in rows]
        return Checked(DataProto.from_dict(tensors, columns), rows)

    def _value(self, name: str) -> Any:
        if name in WIDTHS:
            size = WIDTHS[name]
            entries = torch.arange(int(np.prod(size)), dtype=torch.int64) + 100 * next(self._fresh)
            return entries.reshape(size).tolist()
        number = next(self._fresh)
        return f"u{number}" if name == "uid" else [{"role": "user", "content": f"{number}"}] * (number % 3)

    def order(self, size: int, count: int) -> list[int]:
        return [self.random.randrange(-size, size) for _ in range(count)] if size else []


# ---- operations that make a batch ----------------------------------------------------------------------------------


def take_slice(batches: Batches, it: Checked) -> Checked:
    bounds = [batches.random.choice([None, *range(-MOST_ROWS, MOST_ROWS)]) for _ in range(2)]
    cut = slice(*bounds, batches.random.choice([None, 1, 2, 3, -1, -2]))
    return Checked(it.batch[cut], it.rows[cut])


def take_rows(batches: Batches, it: Checked) -> Checked:
    index = batches.order(len(it.rows), batches.random.randint(0, MOST_ROWS))
    kind = batches.random.choice([list, np.array, torch.tensor])
    chosen = it.batch.select_idxs(kind(index)) if index else it.batch[:0]
    return Checked(chosen, [it.rows[number] for number in index])


def take_mask(batches: Batches, it: Checked) -> Checked:
    mask = [batches.random.random() < 0.6 for _ in it.rows]
    kind = batches.random.choice([np.array, torch.tensor])
    chosen = it.batch[kind(mask)] if mask else it.batch[:0]
    return Checked(chosen, list(itertools.compress(it.rows, mask)))


def take_chunk(batches: Batches, it: Checked) -> Checked | None:
    parts = batches.random.randint(1, 4)
    if len(it.rows) % parts:
        try:
            it.batch.chunk(parts)
        except BatchError:
            return None
        raise AssertionError(f"{len(it.rows)} rows were cut into {parts} equal parts")
    size, chunks = len(it.rows) // parts, it.batch.chunk(parts)
    number = batches.random.randrange(parts)
    return Checked(chunks[number], it.rows[number * size : (number + 1) * size])


def take_split(batches: Batches, it: Checked) -> Checked | None:
    size = batches.random.randint(1, 5)
    parts = it.batch.split(size)
    rows = [it.rows[start : start + size] for start in range(0, len(it.rows), size)]
    assert len(parts) == len(rows), f"{len(parts)} parts of {size} of {len(it.rows)} rows"
    number = batches.random.randrange(len(parts)) if parts else None
    return None if number is None else Checked(parts[number], rows[number])


def repeat(batches: Batches, it: Checked) -> Checked:
    times, interleave = batches.random.randint(1, 3), batches.random.random() < 0.5
    rows = [row for row in it.rows for _ in range(times)] if interleave else it.rows * times
    return Checked(it.batch.repeat(times, interleave), rows)


def repeat_each(batches: Batches, it: Checked) -> Checked:
    counts = [batches.random.randint(0, 2) for _ in it.rows]
    rows = [row for row, count in zip(it.rows, counts) for _ in range(count)]
    return Checked(it.batch.sample_level_repeat(counts), rows)


def join(batches: Batches, it: Checked) -> Checked:
    names = set(it.rows[0]) if it.rows else None
    parts = [other for other in batches.held if other.rows and set(other.rows[0]) == names][:3] or [it]
    batches.random.shuffle(parts)
    return Checked(DataProto.concat([part.batch for part in parts]), [row for part in parts for row in part.rows])


def choose_columns(batches: Batches, it: Checked) -> Checked | None:
    tensors, columns = keys(it.batch)
    tensors, columns = (
        batches.random.sample(names, batches.random.randint(0, len(names))) for names in (tensors, columns)
    )
    if not tensors and not columns:
        return None
    is_deep = batches.random.random() < 0.5
    chosen = it.batch.select(tensors, columns, deepcopy=is_deep)
    return Checked(chosen, [{name: row[name] for name in (*tensors, *columns)} for row in it.rows])


def pad_and_unpad(batches: Batches, it: Checked) -> Checked | None:
    if not it.rows:
        return None
    divisor = batches.random.randint(1, 5)
    padded, count = pad_dataproto_to_divisor(it.batch, divisor)
    assert len(padded) % divisor == 0 and len(padded) - len(it.rows) == count < divisor
    return Checked(copy.copy(unpad_dataproto(padded, count)), list(it.rows))  # without padding it is the same batch


def through_tensordict(batches: Batches, it: Checked) -> Checked | None:
    if not it.rows:  # a stack of no entries has no length
        return None
    return Checked(DataProto.from_tensordict(it.batch.to_tensordict()), list(it.rows))


def through_a_file(batches: Batches, it: Checked) -> Checked:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "batch.safetensors")
        it.batch.save_to_disk(file)
        return Checked(DataProto.load_from_disk(file), copy.deepcopy(it.rows))


def through_a_message(batches: Batches, it: Checked) -> Checked:
    return Checked(pickle.loads(pickle.dumps(it.batch)), copy.deepcopy(it.rows))


def mini_batch(batches: Batches, it: Checked) -> Checked | None:
    sizes = [size for size in range(1, len(it.rows) + 1) if len(it.rows) % size == 0]
    if not sizes:
        return None
    size, seed = batches.random.choice(sizes), batches.random.randrange(100)
    shuffles = batches.random.random() < 0.5
    parts = list(it.batch.make_iterator(size, 1, seed, {"shuffle": shuffles}))
    seen = [row for part in parts for row in rows_of(part)]
    expected = sorted(it.rows, key=_text) if shuffles else it.rows
    assert (sorted(seen, key=_text) if shuffles else seen) == expected, "mini-batches of an epoch are not its rows"
    return Checked(parts[0], seen[:size])


def _text(row: Row) -> str:
    return str(sorted(row.items()))


# ---- operations in place -------------------------------------------------------------------------------------------


def add_columns(batches: Batches, it: Checked) -> None:
    more = batches.new(len(it.rows), ("pair", "uid"), f"more{next(batches._fresh)}_")
    it.batch.union(more.batch)
    it.rows = [{**row, **new} for row, new in zip(it.rows, more.rows)]


def refuse_another_size(batches: Batches, it: Checked) -> None:
    other = batches.new(len(it.rows) + 1, prefix="other_")
    try:
        it.batch.union(other.batch)
    except BatchError:
        return
    raise AssertionError(f"{len(it.rows)} and {len(other.rows)} rows were united")


def pop_columns(batches: Batches, it: Checked) -> Checked | None:
    tensors, columns = keys(it.batch)
    if len(tensors) < 2 or not columns or not it.rows:
        return None
    names = [batches.random.choice(tensors)], [batches.random.choice(columns)] if len(columns) > 1 else []
    popped = it.batch.pop(*names)
    flat = [*names[0], *names[1]]
    rows = [{name: row[name] for name in flat} for row in it.rows]
    it.rows = [{name: value for name, value in row.items() if name not in flat} for row in it.rows]
    return Checked(popped, rows)


def rename_column(batches: Batches, it: Checked) -> None:
    tensors, _ = keys(it.batch)
    if tensors:
        old, new = batches.random.choice(tensors), f"renamed{next(batches._fresh)}"
        it.batch.rename(old, new)
        it.rows = [{new if name == old else name: value for name, value in row.items()} for row in it.rows]


def reorder(batches: Batches, it: Checked) -> None:
    index = batches.random.sample(range(len(it.rows)), len(it.rows))
    if index:
        it.batch.reorder(torch.tensor(index))
        it.rows = [it.rows[number] for number in index]


def append_copies(batches: Batches, it: Checked) -> None:
    if it.rows and len(it.rows) < MOST_ROWS:
        count, place = batches.random.randint(0, 3), batches.random.choice(["", "first", "last"])
        it.batch.padding(count, place)
        it.rows = it.rows + [it.rows[0 if place == "first" else -1]] * count


def write_a_row(batches: Batches, it: Checked) -> Checked | None:
    """Into a deep copy, which shares no memory."""
    tensors, _ = keys(it.batch)
    if not tensors or not it.rows:
        return None
    made = Checked(copy.deepcopy(it.batch), [copy.deepcopy(row) for row in it.rows])
    name, number = batches.random.choice(tensors), batches.random.randrange(len(it.rows))
    made.batch.tensors[name][number] = -1
    made.rows[number][name] = torch.full_like(made.batch.tensors[name][number], -1).tolist()
    return made


def keys(batch: DataProto) -> tuple[list[str], list[str]]:
    return sorted(batch.batch.keys()) if batch.batch is not None else [], sorted(batch.non_tensor_batch)


def make_another(batches: Batches, it: Checked) -> Checked:
    return batches.new(batches.random.randint(0, 6))


Operation = Callable[[Batches, Checked], "Checked | None"]
OPERATIONS: list[Operation] = [
    take_slice, take_rows, take_mask, take_chunk, take_split, repeat, repeat_each, join, choose_columns, pad_and_unpad,
    through_tensordict, through_a_file, through_a_message, mini_batch, add_columns, refuse_another_size, pop_columns,
    rename_column, reorder, append_copies, write_a_row, make_another,
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    batches, began = Batches(Random(arguments.seed)), time.monotonic()
    for number in range(arguments.operations):
        try:
            batches.step()
        except Exception as error:
            print(f"operation {number} of seed {arguments.seed}: {type(error).__name__}: {error}")
            return 1
    counts = ", ".join(f"{name} {count}" for name, count in sorted(batches.counts.items()))
    print(f"{arguments.operations} operations in {time.monotonic() - began:.0f} s, no difference: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
