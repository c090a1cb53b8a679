"""A run that hangs names who does, shows the stacks of its processes, and ends; what it saved before is kept."""

from __future__ import annotations

import re

import pytest

from tests.harness.forked_runs import Server, assert_no_process_left, grpo, prepare
from verl.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow

SLEEPS = """import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    sleeps_for_ever()

def sleeps_for_ever():
    time.sleep(3600)
"""
SCORER_HANGS = r"in stage reward of step 1 \(scoring\) and waits for the reward function's process \(process \d+, sleep"
SAMPLER_HANGS = r"in stage gen of step 2 \(sampling\) and waits for the controller itself"


@pytest.mark.parametrize(
    ("settings", "fault", "culprit", "frame", "saved"),
    [
        (["trainer.hang_seconds=2", "reward.timeout=600"], "", SCORER_HANGS, "in sleeps_for_ever", 0),
        (["trainer.hang_seconds=2"], "generation:8:PAUSE", SAMPLER_HANGS, "in _pause", 1),
    ],
    ids=["a reward function", "the sampler of a local run"],
)
def test_who_hangs_is_named_and_the_run_ends(
    server: Server, tmp_path, settings, fault, culprit, frame, saved, record_property
):
    folder = prepare(tmp_path)
    if not fault:
        (folder / "scorer.py").write_text(SLEEPS)
    ended = server.start(folder, [*grpo(), *settings], fault).wait()
    assert ended.status == 2, ended.output[-3000:]
    (line,) = [line for line in ended.output.splitlines() if "trainer.hang_seconds: nothing has happened for" in line]
    assert re.search(culprit, line), line
    record_property("noticed_seconds", float(re.search(r"nothing has happened for ([\d.]+) s", line)[1]))
    assert frame in (folder / "run/hang.txt").read_text()
    assert "Traceback" not in ended.output
    assert [one.step for one in list_checkpoints(folder / "run")] == [saved][: bool(saved)]
    assert_no_process_left(folder)
