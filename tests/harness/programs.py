"""Runs the library's commands as a user would, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def run(words: list[str], cwd: Path, timeout: float = 600, check: bool = True) -> subprocess.CompletedProcess:
    """Run a command; a failure shows the end of its output."""
    path = f"{cwd}{os.pathsep}{PROJECT}"
    environment = {**os.environ, "PYTHONPATH": path, "VERL_FILE_LOGGER_ROOT": str(cwd / "logs")}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise AssertionError(f"{words} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def command(module: str, *arguments: str, cwd: Path, timeout: float = 600, check: bool = True):
    """``python -m module arguments``."""
    return run([sys.executable, "-m", module, *arguments], cwd, timeout, check)


def metrics(cwd: Path, project: str, experiment: str) -> list[dict]:
    """The steps of a run from its metrics file, each with its number under ``step``."""
    lines = (cwd / "logs" / project / f"{experiment}.jsonl").read_text().splitlines()
    return [{"step": record["step"], **record["data"]} for record in map(json.loads, lines)]


def curve(steps: list[dict], name: str) -> list[float]:
    """All values of one metric in order."""
    return [step[name] for step in steps if name in step]
