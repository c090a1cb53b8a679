"""Rows of the usual schema, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def addition_rows(count: int, data_source: str = "test/addition") -> list[dict[str, Any]]:
    """Prompt rows in the full schema: chat prompt, data_source, ability, reward_model, extra_info."""
    return [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": f"{i % 10}+{i % 7}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10 + i % 7)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(count)
    ]


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations of one sum each."""
    return [{"messages": turns(f"{i}+1=", str(i + 1))} for i in range(count)]


def columns(**values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Columns of a batch that hold anything, one entry per row."""
    made = {name: np.empty(len(entries), dtype=object) for name, entries in values.items()}
    for name, entries in values.items():
        made[name][:] = list(entries)
    return made


def write_prompts(path: str | Path, rows: int | Sequence[Mapping[str, Any]] = 8) -> Path:
    """Write rows (or that many addition prompts) as parquet, jsonl or json, whichever the suffix names."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = addition_rows(rows) if isinstance(rows, int) else [dict(row) for row in rows]
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    else:
        path.write_text(json.dumps(records), encoding="utf-8")
    return path
