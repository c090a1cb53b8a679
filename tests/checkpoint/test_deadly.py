"""A checkpoint at which process after process dies is set aside, and the one before it is read."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.checkpoint.builders import assert_holds, save
from verl.checkpoint import (
    BackgroundCopies,
    CheckpointWriter,
    RemoteCheckpoints,
    find_checkpoint,
    find_or_fetch,
    noted_reading,
)
from verl.errors import CheckpointError, VerlError, WorkerError
from verl.metrics import notices


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of two steps."""
    with CheckpointWriter(tmp_path / "run") as writer:
        for step in (1, 2):
            save(writer, step)
    return tmp_path / "run"


def die_reading(root: Path, times: int, remote: RemoteCheckpoints | None = None) -> None:
    """So many processes find the checkpoint to continue from, and are killed by the kernel while they read it."""
    for _ in range(times):
        child = os.fork()
        if not child:
            try:
                with noted_reading(root, find_or_fetch(root, remote=remote)):
                    os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_checkpoint_at_which_three_processes_died_is_set_aside(run: Path):
    die_reading(run, 3)
    assert_holds(find_checkpoint(run), 2)  # who only looks renames nothing
    assert_holds(find_or_fetch(run), 1)
    assert_holds(run / "quarantined-1-global_step_2", 2)
    words = notices()[f"checkpoint {run / 'global_step_2'}"]
    assert "the last 3 processes that read it died" in words and "it is quarantined-1-global_step_2 now" in words
    with CheckpointWriter(run) as writer:
        save(writer, 2)
    assert_holds(find_or_fetch(run), 2)


def test_a_checkpoint_that_was_read_or_that_two_processes_died_at_stays(run: Path):
    for _ in range(2):
        die_reading(run, 2)
        folder = find_or_fetch(run)
        assert_holds(folder, 2)
        with noted_reading(run, folder):
            pass
    assert not (run / ".reading").exists()


def test_the_only_checkpoint_is_read_again_with_a_notice(run: Path):
    (run / "global_step_1" / "trainer.json").unlink()  # it is damaged now
    die_reading(run, 4)
    assert_holds(find_or_fetch(run), 2)
    assert "because there is no other one" in notices()[f"checkpoint {run / 'global_step_2'}"]


@pytest.mark.parametrize(("error", "step"), [(CheckpointError("another model"), 2), (WorkerError("it died"), 1)])
def test_an_error_is_no_death_unless_it_is_that_of_a_worker(run: Path, error: VerlError, step: int):
    for _ in range(3):
        with pytest.raises(type(error)), noted_reading(run, find_or_fetch(run)):
            raise error
    assert_holds(find_or_fetch(run), step)


def test_the_copy_of_a_checkpoint_that_was_set_aside_is_not_fetched(tmp_path: Path):
    root, remote = tmp_path / "run", RemoteCheckpoints(f"file://{tmp_path}/remote")
    with CheckpointWriter(root, copies=BackgroundCopies(remote)) as writer:
        for step in (1, 2):
            save(writer, step)
    die_reading(root, 3, remote)
    assert_holds(find_or_fetch(root, remote=remote), 1)
    assert not (root / "global_step_2").exists()


def test_a_damaged_note_counts_deaths_from_zero_and_is_reported(run: Path):
    die_reading(run, 3)
    (run / ".reading").write_text("{")
    assert_holds(find_or_fetch(run), 2)
    assert "deaths are counted from 0" in notices()[f"file {run / '.reading'}"]
