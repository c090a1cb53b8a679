"""Under the schedule one_step_off a run that is hit ends with the same bits: what it had sampled ahead is saved."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness.forked_runs import Server, assert_same_end, finish, grpo, prepare
from verl.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow

STEPS = 4
AHEAD = [*grpo(STEPS), "trainer.v1.trainer_mode=one_step_off", "algorithm.rollout_correction.bypass_mode=true"]
RARELY = ["trainer.save_freq=100"]


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("undisturbed"))
    finish(server, folder, AHEAD)
    return folder


def test_killed_while_it_samples_ahead_and_while_it_trains_a_run_ends_with_the_same_bits(
    server: Server, undisturbed: Path, tmp_path: Path
):
    folder = prepare(tmp_path)
    for point in ("generation:12", "backward:6", "shard:9"):
        ended = server.start(folder, AHEAD, f"{point}:KILL").wait()
        assert ended.status == -signal.SIGKILL, f"{point}: {ended.output[-2000:]}"
    finish(server, folder, AHEAD)
    assert_same_end(undisturbed, folder, STEPS)


def test_a_signal_saves_the_batch_that_waits_for_its_step(server: Server, undisturbed: Path, tmp_path: Path):
    """It samples for step 3, which step 2 does before it trains: step 2 is dropped, and its samples are not."""
    folder = prepare(tmp_path)
    ended = server.start(folder, [*AHEAD, *RARELY], "generation:12:TERM").wait()
    assert ended.status == 143 and "stopped after step 1, which is saved in" in ended.output, ended.output[-2000:]
    assert list_checkpoints(folder / "run")[0].step == 1
    assert (folder / "run/global_step_1/queue/batch").is_file()
    finish(server, folder, AHEAD)
    assert_same_end(undisturbed, folder, STEPS)
