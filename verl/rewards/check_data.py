"""Reads the first rows of a data file for `verl.rewards.check`, without the data room: a check must start at once."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from verl import env
from verl.errors import DataError, suggest
from verl.json_text import read_json

ANSWER_KEYS = ("response", "responses", "answer", "output", "solution_str")


def read_rows(path: str, limit: int) -> list[dict[str, Any]]:
    """The first rows of a parquet, json (a list) or jsonl file as dicts."""
    if limit < 1:
        raise DataError("at least one row is needed", key="-n", got=limit)
    file = existing_file(path, "--data")
    if file.suffix == ".parquet":
        rows = _parquet(file, limit)
    elif file.suffix in (".json", ".jsonl"):
        rows = _json(file, limit)
    else:
        raise DataError("unknown kind of file", key="--data", got=path, allowed=".parquet, .json, .jsonl")
    if not rows:
        raise DataError("the file has no rows", key="--data", got=path)
    if not all(isinstance(row, dict) for row in rows):
        raise DataError("every row must be an object with named fields", key="--data", got=path)
    return rows


def read_texts(path: str) -> list[str]:
    """One answer per row: a json list or jsonl of strings (or objects with the field ``response``), or text lines."""
    file = existing_file(path, "--answers")
    if file.suffix not in (".json", ".jsonl"):
        return file.read_text(encoding="utf-8").splitlines()
    texts = []
    for i, row in enumerate(_json(file, None)):
        found = row if isinstance(row, str) else next((row[key] for key in ANSWER_KEYS if key in row), None)
        if not isinstance(found, str):
            raise DataError(f"row {i} holds no answer", key="--answers", got=row, allowed=f"a string, or {ANSWER_KEYS}")
        texts.append(found)
    return texts


def load_json(text: str, key: str) -> dict[str, Any]:
    """A JSON dict from the command line."""
    try:
        value = read_json(text)
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", key=key) from error  # the text may hold secrets
    if not isinstance(value, dict):
        raise DataError("must be a JSON dict", key=key, got=type(value).__name__)
    return value


def existing_file(path: str, key: str) -> Path:
    """The file, ``~`` and variables expanded; an error with the nearest name where there is none."""
    file = Path(env.expand(path))
    if not file.is_file():
        names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        raise DataError("no such file", key=key, got=str(file), fix=suggest(file.name, names))
    return file


def _parquet(file: Path, limit: int) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        first = next(pq.ParquetFile(file).iter_batches(batch_size=limit), None)
        return first.to_pylist() if first is not None else []
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"cannot be read as parquet: {error}", key="--data", got=str(file)) from error


def _json(file: Path, limit: int | None) -> list[Any]:
    try:
        if file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                return [read_json(line) for line in islice((line for line in lines if line.strip()), limit)]
        value = read_json(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(f"cannot be read as JSON: {error}", got=str(file)) from error
    return (value if isinstance(value, list) else [value])[:limit]
