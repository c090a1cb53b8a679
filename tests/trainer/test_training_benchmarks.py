"""Benchmarks of training run; without a peer they time our side alone."""

from __future__ import annotations

import json

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.programs import benchmark


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_sft", "bench_dpo"])
def test_a_benchmark_of_supervised_training_times_our_steps(tmp_path, name):
    figures, words = tmp_path / "figures.json", ["--size", "0.1M", "--steps", "2", "--rounds", "1"]
    benchmark(name, *words, "--json", str(figures), cwd=tmp_path)
    ((row, numbers),) = json.loads(figures.read_text())
    assert row == "0.1M" and numbers["ours, tokens per CPU-s"] > 0


@pytest.mark.slow
def test_the_benchmark_of_a_real_model_shares_out_its_seconds(tmp_path):
    figures, model = tmp_path / "figures.json", tiny_model_dir(tmp_path / "model")
    words = ["--model", str(model), "--json", str(figures), "--more", "data.max_prompt_length=80"]
    benchmark("bench_real_step", *words, cwd=tmp_path)
    rows = dict(json.loads(figures.read_text()))
    assert 0 < rows["training"]["share"] < 1
    assert rows["profile"]["matrix products"] > 0
    assert rows["24 tokens"]["ours, s"] > 0
