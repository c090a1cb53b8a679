"""Rows of Python as a data file of a run: lists of dicts, columns, data frames, data sets, generators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.errors import DataError

Data = str | Path | Iterable[Any]
"""A path, several, or rows of any kind: see `files_of`."""

TRUTHS = ("ground_truth", "answer")
"""Columns of prompts that a reward compares with; the first that is there counts."""
COLUMNS = {
    *("prompt", "data_source", "reward_model", "extra_info", "ability", "uid", "agent_name", "raw_prompt"),
    *("responses", "tools_kwargs", "interaction_kwargs", "need_tools_kwargs", "image", "images", "video", "videos"),
}
"""Of prompts, with a meaning of their name; all others go into ``extra_info``, which a reward function gets."""
FIX = 'Give rows such as [{"prompt": "2 + 3 =", "answer": "5"}], or the path of a parquet or jsonl file.'


def files_of(data: Data, file: Path, key: str, is_prompts: bool, source: str | None = None) -> str | list[str]:
    """What a setting of data files is set to; rows are written to ``file``.

    Args:
        data: a path, several, or rows: dicts, a mapping of columns, a `pandas.DataFrame`, a `datasets.Dataset`, a list
            of prompts, or any iterable of these, which is read to its end.
        file: a parquet file of the run.
        key: the setting, for messages.
        is_prompts: rows are prompts with what a reward needs, else conversations or pairs, which stay as they are.
        source: ``data_source`` of prompts that name none; None leaves them without.

    Raises:
        DataError: no rows, rows of another kind, or a column without a name.
    """
    if isinstance(data, str | Path):
        return str(data)
    rows = data_rows(data, key)
    if rows is None:
        return [str(path) for path in data]
    if is_prompts:
        named = {} if source is None else {"data_source": source}
        rows = [named | prompt_row(row, number, key) for number, row in enumerate(rows)]
    write_rows(rows, file, key)
    return str(file)


def data_rows(data: Data, key: str) -> list[dict[str, Any]] | None:
    """Data of any kind as dicts; None where it is a list of paths."""
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        data = data.to_dict("records")
    elif isinstance(data, Mapping):
        data = _by_row(data, key)
    if not isinstance(data, Iterable):
        raise DataError(f"data is rows or a path, not {type(data).__name__}", key=key, fix=FIX)
    rows = list(data)
    if not rows:
        raise DataError("there are no rows", key=key, fix=FIX)
    if all(isinstance(row, Path) or (isinstance(row, str) and _is_file(row)) for row in rows):
        return None
    return [_row(row, number, key) for number, row in enumerate(rows)]


def _is_file(text: str) -> bool:
    return "\n" not in text and text.endswith((".parquet", ".jsonl", ".json", ".csv", ".arrow"))


def _by_row(columns: Mapping[Any, Any], key: str) -> list[dict[Any, Any]]:
    if any(not isinstance(column, Iterable) or isinstance(column, str) for column in columns.values()):
        raise DataError("a mapping of columns holds a list per column; one row stands in a list", key=key, fix=FIX)
    lists = {name: list(column) for name, column in columns.items()}
    if len({len(column) for column in lists.values()}) > 1:
        lengths = ", ".join(f"{name}: {len(column)}" for name, column in lists.items())
        raise DataError("columns differ in length", key=key, got=lengths)
    return [dict(zip(lists, values)) for values in zip(*lists.values())]


def _row(row: Any, number: int, key: str) -> dict[str, Any]:
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, Mapping):
        raise DataError(f"row {number} is no dict but {type(row).__name__}", key=key, got=row, fix=FIX)
    unnamed = [name for name in row if not isinstance(name, str)]
    if unnamed:
        raise DataError("columns need names", key=key, got=f"row {number}, column {unnamed[0]!r}", fix=FIX)
    return dict(row)


def prompt_row(row: dict[str, Any], number: int, key: str) -> dict[str, Any]:
    """A row in the schema of prompts: the truth in ``reward_model``, columns without a meaning in ``extra_info``."""
    made = {name: value for name, value in row.items() if name in COLUMNS}
    further = {name: value for name, value in row.items() if name not in COLUMNS}
    if "reward_model" not in made:
        name = next((name for name in TRUTHS if name in further), None)
        if name is not None:
            made["reward_model"] = {"style": "rule", "ground_truth": further.pop(name)}
    if further:
        info = made.get("extra_info")
        if info is not None and not isinstance(info, Mapping):
            raise DataError("extra_info is no mapping", key=key, got=f"row {number}: {info!r}")
        made["extra_info"] = {**further, **(info or {})}
    return made


def write_rows(rows: list[dict[str, Any]], file: Path, key: str) -> None:
    """A parquet file of rows.

    Raises:
        DataError: values of one column have different types.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array([_plain(value) for value in values])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"the values of a column have one type: {error}", key=key, got=f"column {name!r}"
            ) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, which pyarrow takes inside of mappings, too."""
    if hasattr(value, "tolist") and not isinstance(value, str | bytes):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
