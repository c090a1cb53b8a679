"""Runs the library's commands as a user would, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str, cwd: Path, timeout: float = 600, check: bool = True) -> subprocess.CompletedProcess:
    """``python -m module arguments``; a failure shows the end of its output."""
    environment = {**os.environ, "PYTHONPATH": f"{cwd}{os.pathsep}{PROJECT}", "VERL_FILE_LOGGER_ROOT": str(cwd / "logs")}
    environment.setdefault("OMP_NUM_THREADS", "2")
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    if check and done.returncode:
        raise AssertionError(f"{module} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def metrics(cwd: Path, project: str, experiment: str) -> list[dict]:
    """The steps of a run from its metrics file, each with its number under ``step``."""
    lines = (cwd / "logs" / project / f"{experiment}.jsonl").read_text().splitlines()
    return [{"step": record["step"], **record["data"]} for record in map(json.loads, lines)]


def curve(steps: list[dict], name: str) -> list[float]:
    """All values of one metric in order."""
    return [step[name] for step in steps if name in step]
