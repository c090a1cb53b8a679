"""Tables as files for other programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from verl.json_text import without_nan
from verl.serving import HttpResponse
from verl.viewer.questions import Row

FORMATS = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}
"""Format -> its media type."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""How a cell begins that a spreadsheet computes: a model or a data set may have written one."""


def as_file(rows: Sequence[Row], name: str, kind: str) -> HttpResponse:
    """The rows as a file that the browser stores; NaN is null, or an empty cell."""
    plain = without_nan(list(rows))
    content = _csv(plain) if kind == "csv" else _parquet(plain)
    return HttpResponse(
        content=content, media=FORMATS[kind], headers={"content-disposition": f'attachment; filename="{name}.{kind}"'}
    )


def _csv(rows: Sequence[Row]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if rows:
        writer.writerow(rows[0])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return text.getvalue().encode(errors="backslashreplace")


def _cell(value: object) -> object:
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _parquet(rows: Sequence[Row]) -> bytes:
    file = io.BytesIO()
    texts = [{name: _encodable(value) for name, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), file, compression="zstd")
    return file.getvalue()


def _encodable(value: object) -> object:
    """A lone surrogate, which UTF-8 does not have, as its escape."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
