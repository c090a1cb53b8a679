"""The single-file references reach on the quickstart's task what the library reaches (see test_learning)."""

from __future__ import annotations

import re
import sys

import pytest

from tests.harness.programs import PROJECT, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "steps"), [("grpo", 12), ("ppo", 16)])
def test_run_freely_it_raises_the_held_out_accuracy_as_the_library_does(arithmetic, name, steps):
    script, data = PROJECT / "examples/single_file" / f"{name}.py", arithmetic.folder / "data"
    words = ["--model", str(arithmetic.model), "--train", f"{data}/train.parquet", "--test", f"{data}/test.parquet"]
    said = run([sys.executable, str(script), *words, "--steps", str(steps)], cwd=arithmetic.folder).stdout
    before, after = (float(x) for x in re.findall(r"held-out accuracy \w+: ([\d.]+)", said))
    assert before <= 0.6
    assert after >= 0.9
    assert said.count("\nstep") == steps
