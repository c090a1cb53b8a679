"""The benchmarks of load and of kills run; their figures come from longer runs."""

from __future__ import annotations

import re

import pytest

from tests.harness.programs import benchmark

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", ["endpoint", "host", "scorers"])
def test_connections_and_hostile_answers_lose_no_result(tmp_path, part):
    printed = benchmark("bench_load", part, "--connections", "40", "--answers", "200", cwd=tmp_path)
    assert printed.startswith(part)


@pytest.mark.parametrize(
    ("role", "mtbf", "seed"), [("trainer", 30, 36), ("reward", 15, 1145), ("sampler", 15, 1145), ("agent", 15, 1145)]
)
def test_a_run_whose_process_is_killed_makes_all_its_steps(tmp_path, role, mtbf, seed):
    """The seeds put a kill 12 s after a trainer's start, or 5 s after a worker's first step, the next much later."""
    words = ["--role", role, "--mtbf", str(mtbf), "--steps", "14", "--seed", str(seed)]
    printed = benchmark("bench_restarts", *words, cwd=tmp_path)
    assert re.match(rf"{role}, MTBF {mtbf} s: 14 steps of \S+ s, [1-9]\d* kills, ", printed), printed
