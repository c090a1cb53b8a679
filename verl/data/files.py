"""Rows from parquet, json and jsonl files, one path or several, as one table that knows where each row came from.

What is wrong with a file is said here, once, with the file, the row and the column.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import DataError, suggest
from verl.json_text import read_json
from verl.storage import copy_to_local, is_remote, resolve

SUFFIXES = (".parquet", ".jsonl", ".json")
PANDAS_INDEX = "__index_level_0__"
UNFIT = (pa.ArrowException, OverflowError, UnicodeError)


@dataclass(frozen=True)
class Origin:
    """Where the rows of a table came from: its files in order, and the number of the first row of each."""

    files: tuple[str, ...]
    starts: tuple[int, ...]

    def locate(self, row: int) -> tuple[str, int]:
        """The file of a row, and its number in that file (from 0)."""
        file = bisect_right(self.starts, row) - 1
        return self.files[file], row - self.starts[file]

    def describe(self, row: int) -> str:
        """``'data/train.parquet, row 17'``."""
        file, number = self.locate(row)
        return f"{file}, row {number}"


def read_files(
    files: str | Path | Iterable[str | Path],
    *,
    required: Sequence[str] = (),
    cache_dir: str | None = None,
    use_shm: bool = False,
    key: str = "data_files",
    column_key: str | None = None,
) -> tuple[pa.Table, Origin]:
    """All rows of one or several files.

    Args:
        files: paths (``~`` and variables are expanded, ``hdfs://`` is fetched into ``cache_dir``).
        required: columns that every file must have.
        key: the setting that named the files; ``column_key`` the one that named the required column.

    Raises:
        DataError: a missing, unreadable or empty file, a missing column, or files whose columns do not fit together.
    """
    paths = check_files(files, key)
    tables = []
    for path in paths:
        local = Path(copy_to_local(path, cache_dir=cache_dir, use_shm=use_shm, key=key))
        table = _read_one(local)
        for column in required:
            require_column(column, table.column_names, file=str(path), key=column_key)
        tables.append(table)
    starts = np.cumsum([0] + [len(t) for t in tables])[:-1]
    return _concatenate(tables, paths), Origin(tuple(str(p) for p in paths), tuple(int(s) for s in starts))


def as_dataset(table: pa.Table) -> Any:
    """The table as a ``datasets.Dataset``, without a copy.

    Its fingerprint is random: the one that ``datasets`` would compute hashes every byte of the table through dill,
    which takes long and fails on some versions of Python; tables in memory are not cached by it.
    """
    from datasets import Dataset

    return Dataset(table, fingerprint=uuid.uuid4().hex[:16])


def check_files(files: str | Path | Iterable[str | Path] | None, key: str) -> list[str | Path]:
    """The paths as a list. Each is a URL (not looked up) or an existing file, else a `DataError` names ``key``."""
    paths = [files] if isinstance(files, (str, Path)) else list(files or ())
    if not paths:
        raise DataError("no file is named", key=key, fix="Give a parquet, json or jsonl file, or a list of them.")
    for path in paths:
        local = None if is_remote(path) else resolve(path, key=key)
        if local is not None and local.is_dir():
            names = sorted(p.name for p in local.iterdir() if p.suffix in SUFFIXES)
            fix = f"It has: {', '.join(names[:8])}." if names else "It has no parquet, json or jsonl file."
            raise DataError("this is a folder; name the files in it", key=key, got=str(local), fix=fix)
    return paths


def require_column(column: str, columns: Sequence[str], *, file: str, key: str | None) -> None:
    """Raise a `DataError` that lists the columns of the file if ``column`` is not among them."""
    if column not in columns:
        near = suggest(column, columns)
        fix = f"{near} Set {key} to the column that holds it." if key else near
        raise DataError(f"no column {column!r}; the file has: {', '.join(columns)}", key=file, fix=fix.strip())


def choose_rows(count: int, max_samples: int, *, shuffle: bool, seed: int | None) -> np.ndarray:
    """Rows to keep, ascending: all (-1), the first ``max_samples``, or that many drawn by the seed (``shuffle``)."""
    if max_samples == 0:
        raise DataError("0 samples leave nothing", key="max_samples", allowed="-1 (all) or a positive number")
    if max_samples < 0 or max_samples >= count:
        return np.arange(count)
    if not shuffle:
        return np.arange(max_samples)
    return np.sort(np.random.default_rng(seed or 0).choice(count, max_samples, replace=False))


def _read_one(path: Path) -> pa.Table:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError("unknown kind of file", key=str(path), got=path.suffix, allowed=SUFFIXES)
    table = _read_parquet(path) if suffix == ".parquet" else _read_json(path)
    if len(table) == 0:
        raise DataError("the file has no rows", key=str(path))
    return table


def _read_parquet(path: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path, memory_map=True).read()
    except (pa.ArrowException, OSError) as failure:
        raise DataError(
            f"not a readable parquet file ({path.stat().st_size} bytes): {failure}",
            key=str(path),
            fix="Was it written to its end? Is it really parquet?",
        ) from failure
    # What other libraries note in the schema (an index, decoders) would change the rows behind the reader's back.
    table = table.replace_schema_metadata(None)
    if PANDAS_INDEX in table.column_names:
        table = table.drop_columns([PANDAS_INDEX])
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid as failure:
            raise DataError(f"column {name!r} is damaged: {failure}", key=str(path)) from failure
    return table


def _read_json(path: Path) -> pa.Table:
    rows, numbers = _parse_json(path)
    columns: dict[str, list[Any]] = {}
    for position, (row, number) in enumerate(zip(rows, numbers)):
        if not isinstance(row, dict):
            raise DataError(f"{number} is not an object with columns", key=str(path), got=_short(row))
        for name, value in row.items():
            # A column that appears late was absent, so null, in the rows before.
            columns.setdefault(name, [None] * position).append(value)
        for values in columns.values():
            values.extend([None] * (position + 1 - len(values)))
    return pa.table({name: _column(values, name, numbers, path) for name, values in columns.items()})


def _parse_json(path: Path) -> tuple[list[Any], list[str]]:
    """The parsed rows, and how to name each in a message."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as failure:
        wrong = path.read_bytes()[: failure.start].count(b"\n") + 1
        raise DataError(f"line {wrong} is not UTF-8: {failure.reason}", key=str(path)) from failure
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        try:
            rows = read_json(text)
        except ValueError as failure:
            raise DataError(f"not valid JSON: {failure}", key=str(path)) from failure
        return rows, [f"row {i}" for i in range(len(rows))]
    rows, numbers = [], []
    # Only "\n" ends a line: str.splitlines would also break at characters that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(read_json(line))
        except ValueError as failure:
            fix = "One JSON object per line." if path.suffix.lower() == ".jsonl" else "A list, or one object per line."
            raise DataError(f"line {number} is not valid JSON: {failure}", key=str(path), fix=fix) from failure
        numbers.append(f"line {number}")
    return rows, numbers


def _column(values: list[Any], name: str, numbers: list[str], path: Path) -> pa.Array:
    try:
        return pa.array(values)
    except UNFIT as failure:
        good, bad = 0, len(values)  # the longest prefix of one type is sought between the two
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if _fits(values[:middle]) else (good, middle)
        broken = isinstance(failure, UnicodeError)
        fault = "holds characters that are no text" if broken else "is of another type than those before"
        raise DataError(
            f"column {name!r}: the value in {numbers[bad - 1]} {fault}: {failure}",
            key=str(path),
            got=_short(values[bad - 1]),
            fix="" if broken else "Write it in one type in every row (for example as a string).",
        ) from failure


def _fits(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except UNFIT:
        return False
    return True


def _concatenate(tables: list[pa.Table], paths: Sequence[str | Path]) -> pa.Table:
    joined = tables[0]
    for table, path in zip(tables[1:], paths[1:]):
        try:
            joined = pa.concat_tables([joined, table], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as failure:
            raise DataError(
                f"its columns have other types than those of the files before it: {failure}", key=str(path)
            ) from failure
    return joined


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
