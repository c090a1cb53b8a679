"""Reads the first rows of a data file for `verl.rewards.check`, without the data room: a check must start at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl import env
from verl.errors import DataError, suggest
from verl.json_text import read_json

ANSWER_KEYS = ("response", "responses", "answer", "output", "solution_str")


OBJECTS = ("reward_model", "extra_info")
"""Columns of objects, which a csv file holds as JSON text."""


def read_rows(path: str, limit: int) -> list[dict[str, Any]]:
    """The first rows, as dicts, of whatever the trainer reads: a file, or a folder that `datasets` saved."""
    if limit < 1:
        raise DataError("at least one row is needed", key="-n", got=limit)
    from verl.storage import formats  # loads pyarrow

    place = Path(env.expand(path))
    if place.is_dir():
        formats.check_folder(place, "--data")
    else:
        existing_file(path, "--data")
    table = formats.first_rows(place, limit)
    if table is None or len(table) < limit:  # fewer rows may come at once than the file has
        table = formats.read_table(place)
    rows: list[dict[str, Any]] = table.slice(0, limit).to_pylist()
    return [_with_objects(row, i) for i, row in enumerate(rows)]


def _with_objects(row: dict[str, Any], number: int) -> dict[str, Any]:
    for name in OBJECTS:
        if isinstance(value := row.get(name), str) and value.lstrip().startswith("{"):
            try:
                row[name] = read_json(value)
            except ValueError as error:
                raise DataError(f"row {number}: {name} cannot be read as JSON: {error}", key="--data") from error
    return row


def read_texts(path: str) -> list[str]:
    """One answer per row: a json list or jsonl of strings (or objects with the field ``response``), or text lines."""
    file = existing_file(path, "--answers")
    if file.suffix not in (".json", ".jsonl"):
        return file.read_text(encoding="utf-8").splitlines()
    texts = []
    for i, row in enumerate(_json(file)):
        text = row if isinstance(row, str) else next((row[key] for key in ANSWER_KEYS if key in row), None)
        if not isinstance(text, str):
            raise DataError(f"row {i} holds no answer", key="--answers", got=row, allowed=f"a string, or {ANSWER_KEYS}")
        texts.append(text)
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


def _json(file: Path) -> list[Any]:
    try:
        if file.suffix == ".jsonl":
            with file.open(encoding="utf-8") as lines:
                return [read_json(line) for line in lines if line.strip()]
        value = read_json(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise DataError(f"cannot be read as JSON: {error}", got=str(file)) from error
    return value if isinstance(value, list) else [value]
