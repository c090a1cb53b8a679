"""The benchmarks of supervised training run; without a peer they time our side alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_sft", "bench_dpo"])
def test_a_benchmark_of_supervised_training_times_our_steps(tmp_path, project_root, name):
    figures, words = tmp_path / "figures.json", ["--size", "0.1M", "--steps", "2", "--rounds", "1"]
    script = project_root / "benchmarks" / f"{name}.py"
    subprocess.run([sys.executable, str(script), *words, "--json", str(figures)], cwd=tmp_path, check=True)
    ((row, numbers),) = json.loads(figures.read_text())
    assert row == "0.1M" and numbers["ours, tokens per CPU-s"] > 0
