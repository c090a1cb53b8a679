"""``verl data FILE ...``: what a data file holds: rows, columns with their types, and the first values of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl import env
from verl.errors import ConfigError, printable
from verl.storage.formats import read_table

SHOWN = 200
"""Characters of a value."""
USES = {
    ("messages",): "verl sft",
    ("prompt", "response"): "verl sft",
    ("question", "answer"): "verl sft",
    ("prompt", "chosen", "rejected"): "verl dpo, verl rm",
    ("prompt", "responses"): "verl eval",
    ("prompt",): "verl train, verl generate",
}
"""Columns -> the commands that read them."""


def main(argv: Sequence[str]) -> int:
    """Print a table for each file.

    Raises:
        ConfigError: no file is named. DataError: it cannot be read.
    """
    if not argv:
        raise ConfigError("a data file is needed", key="verl data", fix="verl data train.parquet")
    for name in argv:
        _show(Path(env.expand(name)), Console())
    return 0


def _show(path: Path, console: Console) -> None:
    table = read_table(path)
    shown = Table(title=f"{path}: {len(table)} rows", title_justify="left")
    for head in ("column", "type", "nulls", "first value"):
        shown.add_column(head, overflow="fold")
    for name in table.column_names:
        column = table.column(name)
        shown.add_row(escape(name), escape(str(column.type)), str(column.null_count), escape(_text(column[0].as_py())))
    console.print(shown)
    uses = [use for columns, use in USES.items() if {*columns} <= {*table.column_names}]
    console.print(
        f"read by: {', '.join(uses)}" if uses else "no command reads these columns by default", highlight=False
    )


def _text(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
