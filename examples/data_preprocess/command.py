"""What the preparation programs share: their flags, writing parquet, and errors as one line instead of a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.errors import VerlError
from verl.storage import copy, expand

Row = dict[str, Any]


def parser(description: str, folder: str | None = None) -> argparse.ArgumentParser:
    """An argument parser with the flags for where to write; ``--local_dir`` is the older name of one.

    Args:
        folder: where it is written without these flags.
    """
    made = argparse.ArgumentParser(description=description)
    made.set_defaults(folder=folder)
    default = f"; {folder} if not given" if folder else ""
    made.add_argument("--local_save_dir", help=f"folder to write to (made if missing){default}")
    made.add_argument("--local_dir", help="older name of --local_save_dir")
    made.add_argument("--hdfs_dir", help="also copy the files to this hdfs:// folder")
    return made


def run(main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Run a program; what it refuses is said in one line on standard error, with exit code 1."""
    try:
        main(argv)
    except VerlError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0


def save_dir(arguments: argparse.Namespace, made: argparse.ArgumentParser) -> Path:
    """The folder to write to; two different names for it, or none, end the program with its usage."""
    wanted = {expand(path) for path in (arguments.local_save_dir, arguments.local_dir) if path}
    wanted = wanted or {expand(path) for path in [arguments.folder] if path}
    if len(wanted) != 1:
        made.error("give --local_save_dir" if not wanted else "--local_save_dir and --local_dir name different folders")
    folder = Path(wanted.pop())
    if folder.is_file():
        made.error(f"--local_save_dir {folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(folder: Path, files: Mapping[str, Sequence[Row]], hdfs_dir: str | None = None) -> None:
    """Write each list of rows as a parquet file and say so."""
    for name, rows in files.items():
        path = folder / name
        partial = path.with_name(path.name + ".partial")
        pq.write_table(pa.Table.from_pylist(list(rows)), partial)
        partial.replace(path)
        print(f"wrote {path} ({len(rows)} rows)")
        if hdfs_dir:
            remote = hdfs_dir.rstrip("/") + "/" + name
            print(f"copied it to {copy(path, remote)}")
