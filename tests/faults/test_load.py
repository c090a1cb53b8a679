"""The benchmarks of load and of kills run; their figures come from longer runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def run_benchmark(root: Path, name: str, *words: str) -> str:
    """What it prints; a status other than 0 is an error."""
    command = [sys.executable, str(root / "benchmarks" / f"{name}.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(command, check=False, cwd=root, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize("part", ["endpoint", "host", "scorers"])
def test_connections_and_hostile_answers_lose_no_result(project_root, part):
    assert run_benchmark(project_root, "bench_load", part, "--connections", "40", "--answers", "200").startswith(part)


@pytest.mark.parametrize(
    ("role", "mtbf", "seed"), [("trainer", 30, 36), ("reward", 15, 1145), ("sampler", 15, 1145), ("agent", 15, 1145)]
)
def test_a_run_whose_process_is_killed_makes_all_its_steps(project_root, role, mtbf, seed):
    """The seeds put a kill 12 s after a trainer's start, or 5 s after a worker's first step, the next much later."""
    words = ["--role", role, "--mtbf", str(mtbf), "--steps", "14", "--seed", str(seed)]
    printed = run_benchmark(project_root, "bench_restarts", *words)
    assert re.match(rf"{role}, MTBF {mtbf} s: 14 steps of \S+ s, [1-9]\d* kills, ", printed), printed
