"""Where the examples of a published data set come from: a folder on this machine, or the hub.

A folder may hold the files of its authors (``train.jsonl``) or be a clone of the hub's (``main/train-*.parquet``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from command import Row, parser, save_dir, write
from verl.data.files import SUFFIXES, read_files, require_column
from verl.errors import DataError, MissingDependencyError
from verl.storage import resolve

Example = Mapping[str, Any]
SEED = 42
SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})")
MakeRow = Callable[[Example, int, str, str], "Row | None"]
"""(example, its number, split, where it is for a message) -> a row, or None for an example that is of no use."""


@dataclass(frozen=True)
class HubDataset:
    """A data set as it is published.

    Args:
        name: on the hub.
        columns: those that are read; a file without one of them is an error.
        splits: split of the data set -> name of the file that is written without its suffix.
        folder: where it is written, unless the command line says otherwise.
        config: which of the hub's configurations.
        leaves_out: which examples make no row, in words; their number is told.
        held_out: share of the only split that becomes test.parquet, drawn with `SEED`.
    """

    name: str
    columns: tuple[str, ...]
    splits: Mapping[str, str]
    folder: str | None = None
    config: str | None = None
    leaves_out: str = "they are of no use"
    held_out: float = 0.0

    def examples(self, source: Path | None, split: str) -> Iterator[tuple[str, Example]]:
        """The examples of a split, each with a name for messages: from a folder, or from the hub where there is none.

        Raises:
            DataError: no such files, a column is missing, or the hub does not answer.
        """
        if source is None:
            yield from ((f"{self.name}, {split}, row {i}", row) for i, row in enumerate(self._from_hub(split)))
            return
        table, origin = read_files(self._files(source, split), key="--local_dataset_path")
        for column in self.columns:
            require_column(column, table.column_names, file=origin.files[0], key=None)
        yield from ((origin.describe(i), row) for i, row in enumerate(table.to_pylist()))

    def parts(self, source: Path | None, split: str) -> dict[str, list[tuple[str, Example]]]:
        """The examples of a split, or what is trained on and what is held out of it."""
        examples = list(self.examples(source, split))
        if not self.held_out:
            return {split: examples}
        train, test = hold_out(len(examples), self.held_out)
        return {"train": [examples[i] for i in train], "test": [examples[i] for i in test]}

    def _files(self, folder: Path, split: str) -> list[str | Path]:
        """The file of a split, or all of its shards; with one split, the only file of data that there is."""
        wanted = ", ".join(f"{name}.jsonl" for name in self.splits)
        if not folder.is_dir():
            raise DataError(f"not a folder with {wanted}", key="--local_dataset_path", got=str(folder))
        for suffix in SUFFIXES:
            if (folder / f"{split}{suffix}").is_file():
                return [folder / f"{split}{suffix}"]
        places = [folder / name for name in ([self.config] if self.config else []) + ["data", "."]]
        for place in places:
            shards = sorted(place.glob(f"{split}-*.parquet"))
            if shards:
                return list(_complete(shards))
        only = [path for place in places[-2:] for path in sorted(place.glob("*")) if path.suffix in SUFFIXES]
        if len(self.splits) == 1 and len(only) == 1:
            return list(only)
        return [resolve(folder / f"{split}.jsonl", key="--local_dataset_path")]

    def _from_hub(self, split: str) -> Any:
        from datasets import load_dataset

        try:
            return load_dataset(self.name, self.config, split=split)
        except ImportError as failure:
            raise MissingDependencyError(f"the hub's data set needs more packages: {failure}") from failure
        except (OSError, ValueError) as failure:
            wanted = " and ".join(f"{name}.jsonl" for name in self.splits)
            raise DataError(
                f"the hub did not give the data set: {failure}",
                got=self.name,
                fix=f"Check the network, or give --local_dataset_path, a folder with {wanted}.",
            ) from failure


def hold_out(count: int, share: float) -> tuple[list[int], list[int]]:
    """Numbers of the examples to train on and of those held out: the split that `datasets` makes with this seed."""
    order = np.random.default_rng(SEED).permutation(count).tolist()
    held = math.ceil(share * count)
    return order[held:], order[:held]


def convert(
    published: HubDataset,
    make_row: MakeRow,
    argv: Sequence[str] | None,
    says: str,
    *,
    agent_name: str | None = None,
    instruction: str | None = None,
) -> None:
    """The whole program of a data set whose every example becomes one row: flags, reading, writing.

    Args:
        says: what the program does, for its usage.
        agent_name: agent loop that runs the rows, unless the command line names one.
        instruction: what a question is followed by, unless the command line says it; ``make_row`` is given it by name.
    """
    made = parser(says, published.folder)
    add_source(made, published)
    made.add_argument(
        "--agent_name", default=agent_name, help="agent loop that runs the rows, written as a column of that name"
    )
    if instruction is not None:
        made.add_argument(
            "--instruction",
            default=instruction,
            help="what follows every question, word for word; '' for nothing",
        )
    arguments = made.parse_args(argv)
    if instruction is not None:
        make_row = functools.partial(make_row, instruction=arguments.instruction)
    folder = save_dir(arguments, made)
    source = source_folder(arguments)
    column = {"agent_name": arguments.agent_name} if arguments.agent_name else {}
    files = {}
    for split, name in published.splits.items():
        for part, examples in published.parts(source, split).items():
            rows = made_rows(published, part, examples, make_row)
            files[f"{name if part == split else part}.parquet"] = [row | column for row in rows]
    write(folder, files, arguments.hdfs_dir)


def add_source(made: Any, published: HubDataset) -> None:
    """The flag that names a folder with the data set."""
    files = " and ".join(f"{name}.jsonl" for name in published.splits)
    made.add_argument("--local_dataset_path", help=f"folder with {files}; without it, the hub's {published.name}")


def source_folder(arguments: Any) -> Path | None:
    """The folder that the flag names."""
    given = arguments.local_dataset_path
    return resolve(given, key="--local_dataset_path") if given else None


def rows_of(published: HubDataset, source: Path | None, split: str, make_row: MakeRow) -> list[Row]:
    """All rows of a split; an example that makes none is left out."""
    return made_rows(published, split, list(published.examples(source, split)), make_row)


def made_rows(
    published: HubDataset, split: str, examples: Sequence[tuple[str, Example]], make_row: MakeRow
) -> list[Row]:
    """The rows of these examples; one that makes none is left out."""
    rows = [make_row(example, index, split, where) for index, (where, example) in enumerate(examples)]
    kept = [row for row in rows if row is not None]
    if len(kept) < len(rows):
        left = f"{len(rows) - len(kept)} of {len(rows)}"
        print(f"{published.name}, {split}: left out {left} examples: {published.leaves_out}")
    if not kept:
        raise DataError("no example of this split can be used", key=f"{published.name}, {split}", got=len(rows))
    return kept


def text_of(example: Example, column: str, where: str) -> str:
    """A column's text; an empty one is an error that names the row."""
    value = example[column]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"the column {column!r} has no text", key=where, got=value)
    return value


def list_of(example: Example, column: str, where: str) -> list[Any]:
    """A column's list; anything else is an error that names the row."""
    value = example[column]
    if not isinstance(value, (list, tuple)):
        raise DataError(f"the column {column!r} has no list", key=where, got=value)
    return list(value)


def fields_of(example: Example, column: str, where: str) -> Mapping[str, Any]:
    """A column's fields by their names; anything else is an error that names the row."""
    value = example[column]
    if not isinstance(value, Mapping):
        raise DataError(f"the column {column!r} has no fields", key=where, got=value)
    return value


def _complete(shards: Sequence[Path]) -> Sequence[Path]:
    """The shards of a split; one that is missing is an error."""
    numbers = SHARD.findall("\n".join(path.name for path in shards))
    wanted = {int(of) for _, of in numbers}
    if numbers and (len(wanted) != 1 or {int(n) for n, _ in numbers} != set(range(next(iter(wanted))))):
        raise DataError(
            "the shards of this split are not complete",
            key="--local_dataset_path",
            got=[path.name for path in shards],
            allowed=f"{max(wanted)} files, numbered from 0",
        )
    return shards


def asked(question: str, instruction: str, between: str = " ") -> str:
    """A question and what follows it."""
    return f"{question}{between}{instruction}" if instruction else question


def prompt_row(
    data_source: str,
    question: str,
    truth: str,
    extra: Mapping[str, Any],
    *,
    ability: str = "math",
    style: str = "rule",
    system: str | None = None,
) -> Row:
    """One row in the schema of the RL dataset."""
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": data_source,
        "prompt": [*messages, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": dict(extra),
    }
