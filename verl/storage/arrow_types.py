"""Column types that rows can hold: encodings of Arrow become the plain types behind them, all else is refused."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from verl.errors import DataError

PANDAS_INDEX = "__index_level_0__"
DEPTH = 50
"""Lists and objects inside each other, at most; Arrow itself ends at 64."""
WRITE_OBJECTS = "Write it as a list of objects (pyarrow: a struct; pandas: dicts), or leave the column out."


def plain_columns(table: pa.Table, file: str) -> pa.Table:
    """The table with columns of text, numbers, lists and objects; dictionaries, views and extensions are resolved.

    Raises:
        DataError: two columns of one name, a damaged column, or a type that no row can hold.
    """
    try:
        names = table.column_names
    except UnicodeError as failure:
        raise DataError(f"the name of a column is not UTF-8: {failure}", key=file) from failure
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        fault = f"{Counter(names)[twice[0]]} columns have the name {twice[0]!r}"
        raise DataError(fault, key=file, fix="Rename or drop all but one.")
    if PANDAS_INDEX in names:
        names = [name for name in names if name != PANDAS_INDEX]
    return pa.table([_plain_column(table.column(name), name, file) for name in names], names=names)


def depth(kind: pa.DataType) -> int:
    """How many lists and objects lie inside each other; at most `DEPTH` + 1 are counted."""
    deepest, level = 0, [kind]
    while level and deepest <= DEPTH:
        level = [field.type for parent in level for field in _fields(parent)]
        deepest += bool(level)
    return deepest


def is_list(kind: pa.DataType) -> bool:
    """A list of any length, in 32 or 64 bit."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _plain_column(column: pa.ChunkedArray, name: str, file: str) -> pa.ChunkedArray:
    try:
        column.validate(full=True)
        if depth(column.type) > DEPTH:
            raise DataError(f"column {name!r} is nested deeper than {DEPTH} levels", key=file)
        plain_type = _plain(column.type, f"column {name!r}", file)
        if plain_type != column.type:
            column = column.cast(plain_type)
        _check_times(column, name, file)
        return column
    except (pa.ArrowException, UnicodeError) as failure:
        raise DataError(f"column {name!r} is damaged: {failure}", key=file) from failure


def _plain(kind: pa.DataType, where: str, file: str) -> pa.DataType:
    """The type that a row of Python values and the package `datasets` can hold."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type, where, file)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain(kind.value_type, where, file)
    if pa.types.is_map(kind) or pa.types.is_union(kind):
        raise DataError(f"{where} holds {kind}, which rows cannot hold", key=file, fix=WRITE_OBJECTS)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type, where, file)) for field in _fields(kind)])
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type, where, file))
    if pa.types.is_nested(kind):
        return pa.list_(_plain(kind.value_type, where, file))
    if kind == pa.string_view():
        return pa.string()
    return pa.binary() if kind == pa.binary_view() else kind


def _check_times(column: pa.ChunkedArray, name: str, file: str) -> None:
    """Times that Python has no value for: a time zone that is not known here, a year after 9999."""
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        return
    try:
        pc.min_max(column).as_py()
    except (pa.ArrowException, ValueError, OverflowError) as failure:
        fix = "Write it as text, or leave the column out."
        raise DataError(f"column {name!r} holds a time that cannot be read: {failure}", key=file, fix=fix) from failure
