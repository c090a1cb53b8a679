"""The benchmarks of load and of kills run; their figures come from longer runs."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize(("role", "mtbf"), [("trainer", 12), ("reward", 4), ("sampler", 4), ("agent", 8)])
def test_a_run_whose_processes_are_killed_makes_all_its_steps(project_root, role, mtbf):
    words = ["--role", role, "--mtbf", str(mtbf), "--steps", "12"]
    assert run_benchmark(project_root, "bench_restarts", *words).startswith(f"{role}, MTBF {mtbf} s: 12 steps")
