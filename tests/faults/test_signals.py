"""A run that is asked to stop saves, says so and leaves; asked twice, it leaves at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.points import PAUSE_SECONDS
from tests.harness.forked_runs import STEPS, STOPPING, Server, assert_same_end, finish, grpo, prepare
from verl.checkpoint import CheckpointWriter, find_checkpoint, list_checkpoints

pytestmark = pytest.mark.slow

RARELY = ["trainer.save_freq=100"]  # so that what is found was saved because of the signal


def newest_step(folder: Path) -> int:
    return list_checkpoints(folder / "run")[0].step


@pytest.mark.parametrize(
    ("point", "name", "status", "saved"),
    [
        ("generation:8", "TERM", 143, 1),  # in the middle of step 2: it is dropped
        ("scoring:3", "INT", 130, 2),
        ("backward:6", "TERM", 143, 2),  # step 2 is already training: it is finished
        ("generation:8", "HUP", 129, 1),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_goes_on_bitwise(
    server: Server, whole, tmp_path, point, name, status, saved
):
    folder = prepare(tmp_path)
    ended = server.start(folder, grpo() + RARELY, f"{point}:{name}").wait()
    assert ended.status == status, ended.output[-2000:]
    assert f"SIG{name}: stopped after step {saved}, which is saved in" in ended.output
    assert "Traceback" not in ended.output
    assert newest_step(folder) == saved
    finish(server, folder, grpo())
    assert_same_end(whole, folder)


def test_a_second_signal_ends_the_run_at_once_and_leaves_the_checkpoint_before(server: Server, tmp_path):
    folder = prepare(tmp_path)
    run = server.start(folder, grpo(), "backward:10:PAUSE")  # step 3, in the middle of training
    run.until_paused()
    run.send(signal.SIGTERM)
    run.until_said(STOPPING)
    run.send(signal.SIGTERM)
    ended = run.wait(PAUSE_SECONDS / 3)
    assert ended.status == 143, "it did not wait for the end of the pause"
    assert "the second signal: leaving at once" in ended.output
    assert newest_step(folder) == 2
    with CheckpointWriter(folder / "run"):  # the lock is free
        assert find_checkpoint(folder / "run") == folder / "run/global_step_2"


def test_a_signal_during_the_last_step_does_not_spoil_a_complete_run(server: Server, tmp_path):
    folder = prepare(tmp_path)
    ended = server.start(folder, grpo(1), "optimizer_end:1:TERM").wait()
    assert ended.status == 0
    assert newest_step(folder) == 1


def test_without_saving_the_sentence_says_that_nothing_is_saved(server: Server, tmp_path):
    folder = prepare(tmp_path)
    ended = server.start(folder, [*grpo(), "trainer.save_freq=-1"], "generation:8:TERM").wait()
    assert ended.status == 143
    assert "nothing is saved, because trainer.save_freq is not set" in ended.output


def test_a_signal_during_validation_keeps_the_step_and_drops_the_validation(server: Server, tmp_path):
    folder = prepare(tmp_path)
    validating = ["data.val_files=train.parquet", "trainer.test_freq=1", "trainer.val_before_train=false"]
    arguments = [*grpo(), *RARELY, *validating]
    ended = server.start(folder, arguments, "generation:8:TERM").wait()  # 5 of the step, the others of its validation
    assert ended.status == 143, ended.output[-2000:]
    assert newest_step(folder) == 1
    finish(server, folder, arguments)
    assert newest_step(folder) == STEPS


def test_ctrl_c_reaches_the_whole_group_and_the_run_still_saves(server: Server, tmp_path):
    """A terminal sends SIGINT to every process of the command: workers that die of it must not spoil the save."""
    folder = prepare(tmp_path)
    workers = ["data.dataloader_num_workers=1"]
    run = server.start(folder, grpo() + RARELY + workers, "optimizer_end:6:PAUSE")
    run.until_paused()
    os.killpg(run.pid, signal.SIGINT)
    run.until_said(STOPPING)
    (folder / "paused").unlink()
    ended = run.wait()
    assert ended.status == 130, ended.output[-2000:]
    assert newest_step(folder) == 2
