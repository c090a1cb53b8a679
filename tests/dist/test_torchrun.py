"""A loop that torchrun starts on two ranks: equal to one process, and bitwise itself after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.engine_cells import flat, loss_of, plain
from tests.dist.spmd_loop import SAVE_AT, STEPS
from tests.engines.builders import model_dir, ragged_batch, relative_error

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def runs(project_root, tmp_path_factory):
    """A run of three steps, and one that continued a copy of its checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("torchrun")
    path = model_dir(folder, "qwen2")
    script = str(project_root / "tests" / "dist" / "spmd_loop.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, script, str(path), str(folder)],
        env={**os.environ, "PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def losses(folder) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


def test_a_resumed_run_is_bitwise_the_one_that_went_on(runs):
    assert losses(runs / "resumed") == losses(runs / "straight")[SAVE_AT:]
    final = [load_file(runs / name / "final.safetensors")["weights"] for name in ("straight", "resumed")]
    assert torch.equal(*final)


def test_every_step_equals_one_process_on_the_whole_batch(runs):
    engine, expected = plain(runs / "qwen2"), []
    for step in range(STEPS):
        expected.append(engine.train_batch(ragged_batch(rows=5, seed=step), loss_of("causal_lm")).values()["loss"])
        engine.step_scheduler()
    assert losses(runs / "straight") == pytest.approx(expected, rel=1e-5)
    weights = load_file(runs / "straight" / "final.safetensors")["weights"]
    assert relative_error(weights, flat(engine.export_weights())) < 1e-5
