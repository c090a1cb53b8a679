"""One step's file of samples: its short columns for the index, and its texts and tokens one row at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl.errors import DataError
from verl.journal.columns import Names
from verl.json_text import JsonObject, read_json

INDEX = {
    "uid": np.int32, "sample": np.int32, "row": np.int64, "score": np.float64, "length": np.int32,
    "finish": np.int16, "oldest_version": np.int32, "clipped": np.float32, "reason": np.int16,
}  # fmt: skip
"""Columns of the index -> type; -1, or NaN, where a file does not say. A reason of -1 is not known, "" is trained."""
FILE_NAMES = {"finish": "finish_reason"}
Record = dict[str, Any]
"""All of a sample by column."""
UNREADABLE = (OSError, pa.ArrowException, ValueError, TypeError, LookupError, OverflowError)
"""What reading raises of a file that is damaged, or that was deleted or replaced meanwhile."""
FIXED = ("input", "output", "gts", "score", "step", "uid", "sample", "row", "response_tokens",
         "response_finish_reason")  # fmt: skip
"""Keys of a JSON line that are no further values."""


@dataclass
class StepSamples:
    """A file of one step.

    Args:
        columns: of `INDEX`, (N,) each.
        offsets: of a file of JSON lines: where each line begins.

    Attributes:
        notice: about rows that could not be read; empty.
    """

    step: int
    path: Path
    columns: dict[str, np.ndarray]
    offsets: np.ndarray | None = None
    notice: str = ""
    has_tokens: bool = False
    _groups: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.columns["uid"])

    def texts(self, rows: Sequence[int], name: str, characters: int) -> list[str]:
        """The beginning of ``input`` or ``output`` of some rows; raises one of `UNREADABLE`."""
        if self.offsets is not None:
            return [str(self._line(row).get(name, ""))[:characters] for row in rows]
        made: dict[int, str] = {}
        with pq.ParquetFile(self.path) as file:
            for group, places in self._by_group(file, rows).items():
                column = file.read_row_group(group, columns=[name])[name].combine_chunks()
                texts = column.take(pa.array([place for _, place in places]))
                for (row, _), text in zip(places, pc.utf8_slice_codeunits(texts, 0, characters).to_pylist()):
                    made[row] = text or ""
        return [made[row] for row in rows]

    def record(self, row: int) -> Record:
        """All of one row: ``input``, ``output``, ``gts``, ``extra``, ``picture``, and the lists of its tokens.

        Raises:
            OSError, pyarrow.ArrowException, ValueError, TypeError, LookupError, OverflowError: as `UNREADABLE`.
        """
        if self.offsets is not None:
            line = self._line(row)
            extra = {name: value for name, value in line.items() if name not in FIXED}
            return {"input": line.get("input"), "output": line.get("output"), "gts": line.get("gts"), "extra": extra}
        with pq.ParquetFile(self.path) as file:
            ((group, places),) = self._by_group(file, [row]).items()
            made: Record = file.read_row_group(group).slice(places[0][1], 1).to_pylist()[0]
        made["extra"] = read_json(made["extra"]) if made.get("extra") else {}
        made["gts"] = read_json(made["gts"]) if made.get("gts") else None
        return made

    def contains(self, text: str) -> np.ndarray:
        """(N,) bool: rows whose prompt or response has a text in small or large letters; raises one of `UNREADABLE`."""
        if self.offsets is not None:
            has = re.compile(re.escape(text), re.IGNORECASE).search
            lines = (self._line(row) for row in range(len(self)))
            return np.array([bool(has(str(line.get("input"))) or has(str(line.get("output")))) for line in lines], bool)
        made = np.zeros(len(self), dtype=bool)
        with pq.ParquetFile(self.path) as file:
            table = file.read(columns=["input", "output"], use_threads=False)
        if len(table) != len(self):
            raise ValueError("another number of rows than before")
        for column in table.columns:
            made |= pc.match_substring(column, text, ignore_case=True).fill_null(False).to_numpy()
        return made

    def _by_group(self, file: pq.ParquetFile, rows: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Row group -> (row, its place in it)."""
        if self._groups is None:
            counts = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            self._groups = np.cumsum([0, *counts])
        made: dict[int, list[tuple[int, int]]] = {}
        for row in rows:
            group = int(np.searchsorted(self._groups, row, side="right")) - 1
            made.setdefault(group, []).append((row, row - int(self._groups[group])))
        return made

    def _line(self, row: int) -> JsonObject:
        assert self.offsets is not None
        with self.path.open("rb") as file:
            file.seek(int(self.offsets[row]))
            line = read_json(file.readline())
        if not isinstance(line, dict):
            raise ValueError("no sample at its place")
        return line


def read_parquet(path: Path, step: int, uids: Names, finishes: Names, reasons: Names) -> StepSamples:
    """The index of a file with token data.

    Raises:
        pyarrow.ArrowException, OSError: it is truncated, or no such file.
    """
    with pq.ParquetFile(path) as file:
        present = set(file.schema_arrow.names)
        names = [stored for name in INDEX if (stored := FILE_NAMES.get(name, name)) in present]
        if "uid" not in present or "output" not in present:
            raise DataError("this parquet file has no samples", got=str(path))
        table = file.read(columns=names, use_threads=False)
    codes = {"uid": uids, "finish": finishes, "reason": reasons}
    columns = {}
    for name, kind in INDEX.items():
        stored = FILE_NAMES.get(name, name)
        if stored not in present:
            columns[name] = np.full(len(table), _missing(kind), kind)
        elif name in codes:
            column = table[stored].combine_chunks().dictionary_encode()
            numbers = np.append(codes[name].numbers(column.dictionary.to_pylist()), -1)
            columns[name] = numbers[column.indices.fill_null(-1).to_numpy(zero_copy_only=False)].astype(kind)
        else:
            columns[name] = _numbers(table[stored], kind)
    return StepSamples(step, path, columns, has_tokens="token_id" in present)


def read_lines(path: Path, step: int, uids: Names, finishes: Names) -> StepSamples:
    """The index of a file of JSON lines; lines that are none are left out, with a notice.

    Files of earlier releases name no prompt: rows with the same text of the prompt are a group then.

    Raises:
        OSError: it cannot be read.
    """
    values: dict[str, list[Any]] = {name: [] for name in INDEX}
    offsets, at, faults = list[int](), 0, list[int]()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            begin, at = at, at + len(line)
            try:
                record = read_json(line)
                uid = record.get("uid") or _name_of(step, str(record.get("input")))
                score = record.get("score")
                row = {"uid": uids.number(str(uid)), "finish": _code(finishes, record.get("response_finish_reason")),
                       "score": np.nan if score is None else float(score), "reason": -1, "clipped": np.nan,
                       "oldest_version": -1}  # fmt: skip
                row |= {name: _integer(record.get(name)) for name in ("sample", "row")}
                row["length"] = _integer(record.get("response_tokens"))
            except (ValueError, TypeError, AttributeError, OverflowError):
                if line.strip():
                    faults.append(number)
                continue
            offsets.append(begin)
            for name in INDEX:
                values[name].append(row[name])
    notice = f"{path}: {len(faults)} lines are no samples, the first is line {faults[0]}: left out" if faults else ""
    columns = {name: np.array(values[name], dtype=kind) for name, kind in INDEX.items()}
    return StepSamples(step, path, columns, np.array(offsets, dtype=np.int64), notice)


def _numbers(column: pa.ChunkedArray, kind: type) -> np.ndarray:
    filled = column.fill_null(_missing(kind)) if column.null_count else column
    return filled.to_numpy().astype(kind)


def _missing(kind: type) -> float | int:
    return np.nan if kind in (np.float64, np.float32) else -1


def _code(names: Names, text: object) -> int:
    return -1 if text is None else names.number(str(text))


def _integer(value: object) -> int:
    return value if type(value) is int and -1 <= value < 1 << 31 else -1


def _name_of(step: int, prompt: str) -> str:
    return f"step {step}, prompt {hashlib.sha256(prompt.encode(errors='replace')).hexdigest()[:12]}"
