"""Rows from one path or several, as one table that knows where each row came from. Kinds of files: `formats`."""

from __future__ import annotations

import difflib
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.errors import DataError, suggest
from verl.storage import copy_to_local, expand, is_hub_name, is_remote, resolve
from verl.storage.formats import CONVERT, SUFFIXES, check_folder, check_suffix, read_table

SAVE_FROM_HUB = (
    'Save it first: python -c "from datasets import load_dataset; '
    "load_dataset({name!r}, split='train').to_parquet('train.parquet')\", then name train.parquet "
    "(docs/howto/data.md). "
    "A data set with several configurations needs the name of one, too: load_dataset({name!r}, 'main', ...)."
)
ALIKE = (
    ("prompt", "prompts", "question", "problem", "instruction", "query", "input"),
    ("messages", "conversations", "conversation", "chat", "dialog", "dialogue"),
    ("response", "answer", "output", "completion", "solution", "target"),
    ("chosen", "accepted", "preferred", "win", "better"),
    ("rejected", "reject", "dispreferred", "lose", "worse"),
)
"""Names that data sets give to columns of one meaning."""


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
        table = read_table(local)
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
    """The paths as a list. Each is a URL (not looked up), a file of a kind that is read, or a saved data set.

    Raises:
        DataError: it is none of them; names ``key`` and what to give instead.
    """
    paths = [files] if isinstance(files, (str, Path)) else list(files or ())
    if not paths:
        raise DataError("no file is named", key=key, fix="Give a parquet, jsonl, json, csv or arrow file, or a list.")
    for path in paths:
        if is_remote(path):
            check_suffix(Path(str(path)))
            continue
        if looks_like_hub_name(path):
            fault = "no such file; data sets of the hub are saved before a run reads them"
            raise DataError(fault, key=key, got=str(path), fix=SAVE_FROM_HUB.format(name=str(path)))
        local = resolve(path, key=key)
        if local.is_dir():
            check_folder(local, key)
        else:
            check_suffix(local)
    return paths


def looks_like_hub_name(path: str | Path) -> bool:
    """Whether ``owner/name`` is more likely a data set of the hub than a file that is missing."""
    text = str(path)
    suffix = Path(text).suffix.lower()
    return is_hub_name(text) and not Path(expand(text)).exists() and suffix not in (*SUFFIXES, *CONVERT)


def require_column(column: str, columns: Sequence[str], *, file: str, key: str | None) -> None:
    """Raise a `DataError` that names the nearest and all columns of the file if ``column`` is not among them."""
    if column in columns:
        return
    near = nearest_column(column, columns)
    fix = f"Set {key}={near}, if that is the column." if near else f"Set {key} to the column that holds it."
    if not key:
        fix = suggest(column, columns)
    raise DataError(f"no column {column!r}; the file has: {', '.join(columns)}", key=file, fix=fix)


def nearest_column(column: str, columns: Sequence[str]) -> str | None:
    """The column that is spelt most alike, or that means the same."""
    near = difflib.get_close_matches(column, columns, n=1, cutoff=0.6)
    alike = [name for names in ALIKE if column in names for name in names if name in columns]
    return next(iter(near + alike), None)


def choose_rows(count: int, max_samples: int, *, shuffle: bool, seed: int | None) -> np.ndarray:
    """Rows to keep, ascending: all (-1), the first ``max_samples``, or that many drawn by the seed (``shuffle``)."""
    if max_samples == 0:
        raise DataError(
            "0 samples leave nothing", key="data.train_max_samples", allowed="-1 (all) or a positive number"
        )
    if max_samples < 0 or max_samples >= count:
        return np.arange(count)
    if not shuffle:
        return np.arange(max_samples)
    return np.sort(np.random.default_rng(seed or 0).choice(count, max_samples, replace=False))


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
