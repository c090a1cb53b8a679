"""One file, or one folder that `datasets` saved, as a table: parquet, jsonl, json, csv and arrow.

What is wrong is said with the file, the row (counted from 0) and, in text files, the line (counted from 1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from verl.errors import DataError
from verl.json_text import read_json
from verl.storage.arrow_types import DEPTH, depth, plain_columns

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".arrow")
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write into a folder."""
SMALL = 32_000_000
"""Bytes of a text file up to which a first look reads all of it."""
CONVERT = {
    ".tsv": "pandas.read_csv({0!r}, sep='\\t').to_parquet({1!r})",
    ".xlsx": "pandas.read_excel({0!r}).to_parquet({1!r})",
    ".feather": "pandas.read_feather({0!r}).to_parquet({1!r})",
    ".ndjson": "pandas.read_json({0!r}, lines=True).to_parquet({1!r})",
    ".orc": "pandas.read_orc({0!r}).to_parquet({1!r})",
    ".pkl": "pandas.read_pickle({0!r}).to_parquet({1!r})",
}
BEGINNINGS = {
    b"PAR1": "a parquet file",
    b"ARROW1": "an arrow file",
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
}
UNFIT = (pa.ArrowException, OverflowError, UnicodeError, RecursionError)


def read_table(path: Path) -> pa.Table:
    """All rows, in column types that `datasets` takes.

    Raises:
        DataError: another kind of file, an unreadable or empty one, or a column that rows cannot hold.
    """
    table = _reader(path)(path)
    if len(table) == 0:
        raise DataError("the file has no rows", key=str(path))
    return table


def first_rows(path: Path, most: int = 1) -> pa.Table | None:
    """The first rows with all columns, without the rest of a large file; a small text file is read to its end.

    At most ``most``, which may be fewer than there are where an arrow file holds few rows at a time.

    None: only all rows of this file would tell, and they are many.
    """
    _reader(path)
    if path.suffix.lower() == ".parquet":
        with _opened_parquet(path) as file:
            batch = next(_damage_named(file.iter_batches(batch_size=most), path), None)
            table = None if batch is None else pa.Table.from_batches([batch])
    elif path.is_dir() or path.suffix.lower() == ".arrow":
        names = _saved_files(path) if path.is_dir() else [path]
        table = next((part for part in map(_first_batch, names) if len(part)), None)
    elif path.stat().st_size > SMALL:
        return None
    else:
        return read_table(path)
    if table is None:
        raise DataError("the file has no rows", key=str(path))
    return _cleaned(table.slice(0, most), path)


def check_suffix(path: Path) -> None:
    """Refuse a kind of file that is not read, with the line that converts it."""
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return
    line = CONVERT.get(suffix)
    fix = f"Convert it: {line.format(str(path), str(path.with_suffix('.parquet')))}" if line else ""
    if suffix in (".gz", ".zst", ".zip", ".bz2", ".xz"):
        fix = "Unpack it first."
    raise DataError("unknown kind of file", key=str(path), got=path.suffix, allowed=SUFFIXES, fix=fix)


def check_folder(folder: Path, key: str) -> None:
    """Only what `datasets` saved is read as a folder."""
    if is_saved_dataset(folder):
        return
    splits = saved_splits(folder)
    if splits:
        fault, fix = "this folder holds several splits", f"Name one: {', '.join(str(folder / s) for s in splits)}."
    else:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES)
        fault = "this is a folder; name the files in it"
        fix = f"It has: {', '.join(names[:8])}." if names else f"It has no file that ends with {', '.join(SUFFIXES)}."
    raise DataError(fault, key=key, got=str(folder), fix=fix)


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` wrote this folder."""
    return (folder / SAVED).is_file() and (folder / "dataset_info.json").is_file()


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder that `datasets.DatasetDict.save_to_disk` wrote; none for any other."""
    if not (folder / SAVED_SPLITS).is_file():
        return []
    return sorted(place.parent.name for place in folder.glob(f"*/{SAVED}"))


def _reader(path: Path) -> Callable[[Path], pa.Table]:
    if path.is_dir():
        return _read_saved
    check_suffix(path)
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json", ".csv"):
        _check_beginning(path)
    return {".parquet": _read_parquet, ".arrow": _read_arrow, ".csv": _read_csv}.get(suffix, _read_json)


def _check_beginning(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(8)
    for start, what in BEGINNINGS.items():
        if head.startswith(start):
            raise DataError(f"its name ends with {path.suffix}, but this is {what}", key=str(path))


def _opened_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError, UnicodeError) as failure:
        raise _unreadable(path, failure) from failure


def _unreadable(path: Path, failure: Exception, kind: str = "parquet") -> DataError:
    return DataError(
        f"not a readable {kind} file ({path.stat().st_size} bytes): {failure}",
        key=str(path),
        fix=f"Was it written to its end? Is it really {kind}?",
    )


def _damage_named(batches: Iterator[Any], path: Path) -> Iterator[Any]:
    try:
        yield from batches
    except (pa.ArrowException, OSError, UnicodeError) as failure:
        raise _unreadable(path, failure) from failure


def _read_parquet(path: Path) -> pa.Table:
    with _opened_parquet(path) as file:
        try:
            table = file.read()
        except (pa.ArrowException, OSError, UnicodeError) as failure:
            raise _unreadable(path, failure) from failure
    return _cleaned(table, path)


def _opened_arrow(path: Path) -> pa.RecordBatchReader | pa.ipc.RecordBatchFileReader:
    source = pa.memory_map(os.fspath(path))
    is_file = source.size() >= 8 and source.read_at(6, 0) == b"ARROW1"
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _read_arrow(path: Path) -> pa.Table:
    try:
        table = _opened_arrow(path).read_all()
    except (pa.ArrowException, OSError, UnicodeError) as failure:
        raise _unreadable(path, failure, "arrow") from failure
    return _cleaned(table, path)


def _first_batch(path: Path) -> pa.Table:
    try:
        reader = _opened_arrow(path)
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            batches = [reader.get_batch(0)] if reader.num_record_batches else []
        else:
            batches = [next(iter(reader))]
        return pa.Table.from_batches(batches, reader.schema)
    except StopIteration:
        return pa.table({})
    except (pa.ArrowException, OSError, UnicodeError) as failure:
        raise _unreadable(path, failure, "arrow") from failure


def _saved_files(folder: Path) -> list[Path]:
    """The arrow files of a saved data set, in order; a name that leads out of the folder is refused."""
    try:
        entries = read_json((folder / SAVED).read_text(encoding="utf-8"))["_data_files"]
        names = [str(entry["filename"]) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError) as failure:
        raise DataError(f"{SAVED} does not list the files of the data set: {failure}", key=str(folder)) from failure
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError(f"{SAVED} names a file that is not in the folder", key=str(folder), got=name)
    return [folder / name for name in names]


def _read_saved(folder: Path) -> pa.Table:
    parts = [_read_arrow(path) for path in _saved_files(folder)]
    return pa.concat_tables(parts, promote_options="permissive") if parts else pa.table({})


def _cleaned(table: pa.Table, path: Path) -> pa.Table:
    """Checked, in plain column types, and without what other libraries note in the schema.

    That (an index, decoders) would change the rows behind the reader's back.
    """
    return plain_columns(table.replace_schema_metadata(None), str(path))


def _read_csv(path: Path) -> pa.Table:
    """Every value is a text, as it stands: nothing makes a number of the answer 007."""
    wrong: list[pv.InvalidRow] = []

    def refuse(row: pv.InvalidRow) -> str:
        wrong.append(row)
        return "error"

    ordered = pv.ReadOptions(use_threads=False)  # only then rows have numbers
    quoted = pv.ParseOptions(newlines_in_values=True, invalid_row_handler=refuse)
    try:
        names = pv.open_csv(path, ordered, quoted).schema.names
        as_text = pv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False, quoted_strings_can_be_null=False
        )
        table = pv.read_csv(path, ordered, quoted, as_text)
    except (pa.ArrowException, OSError, UnicodeError) as failure:
        if wrong:
            row = wrong[0]
            raise DataError(
                f"row {(row.number or 2) - 2} has {row.actual_columns} values for {row.expected_columns} columns",
                key=str(path),
                got=short(row.text),
                fix='Put values with a comma, a quote or a line break between quotes (").',
            ) from failure
        if path.stat().st_size == 0:
            raise DataError("the file has no rows", key=str(path)) from failure
        raise _unreadable(path, failure, "csv") from failure
    return plain_columns(table, str(path))


def _read_json(path: Path) -> pa.Table:
    rows, numbers = _parse_json(path)
    columns: dict[str, list[Any]] = {}
    for position, (row, number) in enumerate(zip(rows, numbers)):
        if not isinstance(row, dict):
            raise DataError(f"{number} is not an object with columns", key=str(path), got=short(row))
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
        fix = "Save the file as UTF-8."
        raise DataError(f"line {wrong} is not UTF-8: {failure.reason}", key=str(path), fix=fix) from failure
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        rows = _loads(text, path, "the file", "")
        return rows, [f"row {i}" for i in range(len(rows))]
    rows, numbers = [], []
    fix = "One JSON object per line." if path.suffix.lower() == ".jsonl" else "A list, or one object per line."
    # Only "\n" ends a line: str.splitlines would also break at characters that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"row {len(rows)} (line {number})"
        rows.append(_loads(line, path, place, fix))
        numbers.append(place)
    return rows, numbers


def _loads(text: str, path: Path, place: str, fix: str) -> Any:
    try:
        return read_json(text)
    except ValueError as failure:
        raise DataError(f"{place} cannot be read as JSON: {failure}", key=str(path), fix=fix) from failure


def _column(values: list[Any], name: str, numbers: list[str], path: Path) -> pa.Array:
    try:
        column = pa.array(values)
        if depth(column.type) <= DEPTH:
            return column
        failure: Exception = RecursionError()
    except UNFIT as error:
        failure = error
    good, bad = 0, len(values)  # the longest prefix of one type is sought between the two
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _fits(values[:middle]) else (good, middle)
    where = f"column {name!r}: the value in {numbers[bad - 1]}"
    if isinstance(failure, RecursionError):
        raise DataError(f"{where} is nested deeper than {DEPTH} levels", key=str(path)) from failure
    broken = isinstance(failure, UnicodeError)
    fault = "holds characters that are no text" if broken else "is of another type than those before"
    raise DataError(
        f"{where} {fault}: {failure}",
        key=str(path),
        got=short(values[bad - 1]),
        fix="" if broken else "Write it in one type in every row (for example as a string).",
    ) from failure


def _fits(values: list[Any]) -> bool:
    try:
        return depth(pa.array(values).type) <= DEPTH
    except UNFIT:
        return False


def short(value: object) -> str:
    """A value for a message: at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
