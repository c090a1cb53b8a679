"""Copies to HDFS under upstream's path; they run ``hdfs dfs``, and take local paths, too."""

from pathlib import Path
from typing import Any

from verl.storage import copy, exists
from verl.storage.paths import HDFS, check_scheme, expand, run_hdfs


def makedirs(name: str | Path, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Make a folder and those above it; HDFS knows no ``mode``."""
    text = expand(name)
    check_scheme(text)
    if text.startswith(HDFS):
        run_hdfs("-mkdir", "-p", text)
    else:
        Path(text).mkdir(mode, parents=True, exist_ok=exist_ok)
