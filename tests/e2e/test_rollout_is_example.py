"""The example of rollout importance sampling runs from nothing and prints what it measured."""

from __future__ import annotations

import os
import sys

import pytest

from tests.harness.programs import PROJECT, metrics, run

pytestmark = pytest.mark.slow
SCRIPT = str(PROJECT / "examples/rollout_importance_sampling/run_with_rollout_is.sh")


def test_the_example_script_makes_its_model_trains_and_shows_the_mismatch(tmp_path, monkeypatch):
    for name, value in {"PYTHON": sys.executable, "TINY": "1", "LEVEL": "sequence", "MODE": "mask"}.items():
        monkeypatch.setitem(os.environ, name, value)
    done = run(["bash", SCRIPT, "data.val_files=[]"], cwd=tmp_path)
    assert "rollout_is_eff_sample_size" in done.stdout and "above 0.8" in done.stdout
    (step,) = metrics(tmp_path / "outputs/rollout_is", "rollout_is", "sequence_mask")
    assert step["mismatch/mismatch_k3_kl"] > 1e-7, "the sampler rounds to bfloat16"
    assert "mismatch/rollout_is_masked_fraction" in step
