"""A checkpoint at which process after process vanishes is passed over, and the one before it is read."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoint.builders import assert_holds, save
from tests.harness.waiting import wait_until
from verl.checkpoint import (
    BackgroundCopies,
    CheckpointWriter,
    RemoteCheckpoints,
    RunLock,
    find_or_fetch,
    noted_reading,
)
from verl.checkpoint.deadly import ReadingNote
from verl.errors import CheckpointError, VerlError, WorkerError
from verl.metrics import notices
from verl.trainer.signals import StopSignals


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoints of three steps."""
    with CheckpointWriter(tmp_path / "run") as writer:
        for step in (1, 2, 3):
            save(writer, step)
    return tmp_path / "run"


def die_reading(root: Path, times: int, remote: RemoteCheckpoints | None = None) -> None:
    """So many runs find the checkpoint to continue from, and are killed by the kernel while they read it."""
    for _ in range(times):
        child = os.fork()
        if not child:
            try:
                with RunLock(root), noted_reading(root, find_or_fetch(root, remote=remote)):
                    os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def read(root: Path, remote: RemoteCheckpoints | None = None) -> Path:
    """The checkpoint that the next run reads to its end."""
    with RunLock(root):
        folder = find_or_fetch(root, remote=remote)
        with noted_reading(root, folder):
            return folder


def test_a_checkpoint_at_which_three_processes_died_is_passed_over(run: Path):
    die_reading(run, 3)
    assert_holds(find_or_fetch(run), 3)  # a program without the lock decides nothing
    for _ in range(2):
        assert_holds(read(run), 2)
    assert "the last 3 processes that read it died" in notices()["checkpoint global_step_3, save 3"]
    assert f"trainer.resume_from_path={run / 'global_step_3'}" in notices()[f"checkpoint {run / 'global_step_3'}"]
    assert_holds(run / "global_step_3", 3)
    with CheckpointWriter(run) as writer:
        save(writer, 3)  # again, as the fourth save
    assert_holds(read(run), 3)


def test_programs_without_the_lock_count_for_nothing(run: Path):
    with ExitStack() as readers:
        for _ in range(4):
            readers.enter_context(noted_reading(run, find_or_fetch(run)))
            assert_holds(find_or_fetch(run), 3)
            assert not (run / ".reading").exists()


def test_a_checkpoint_that_was_read_or_that_two_processes_died_at_stays(run: Path):
    for _ in range(2):
        die_reading(run, 2)
        assert_holds(read(run), 3)
    assert not (run / ".reading").exists()


def test_a_machine_on_which_the_second_one_dies_too_is_named(run: Path):
    die_reading(run, 6)
    with RunLock(run), pytest.raises(CheckpointError, match="global_step_3, save 3 or global_step_2, save 2: the mach"):
        find_or_fetch(run)
    assert_holds(read(run), 3)  # on a larger machine
    assert not (run / ".reading").exists()


def test_after_a_read_succeeded_a_further_one_may_be_passed_over(run: Path):
    die_reading(run, 3)
    assert_holds(read(run), 2)
    die_reading(run, 3)
    assert_holds(read(run), 1)


def test_one_that_is_read_by_its_path_is_used_again(run: Path):
    die_reading(run, 3)
    assert_holds(read(run), 2)
    with RunLock(run), noted_reading(run, find_or_fetch(run, "resume_path", run / "global_step_3")):
        pass
    assert_holds(read(run), 3)


def test_the_only_checkpoint_is_read_again_with_a_notice(run: Path):
    for step in (1, 2):
        (run / f"global_step_{step}" / "trainer.json").unlink()  # it is damaged now
    die_reading(run, 4)
    assert_holds(read(run), 3)
    assert "because there is no other one" in notices()["checkpoint global_step_3"]


@pytest.mark.parametrize("error", [CheckpointError("another model"), WorkerError("another rank has no memory")])
def test_an_error_is_no_death(run: Path, error: VerlError):
    for _ in range(4):
        with RunLock(run), pytest.raises(type(error)), noted_reading(run, find_or_fetch(run)):
            raise error
    assert_holds(read(run), 3)


def test_a_run_that_a_signal_ends_while_it_reads_is_no_death(run: Path):
    die_reading(run, 2)
    with RunLock(run), StopSignals(), noted_reading(run, find_or_fetch(run)):
        assert ReadingNote.read(run).readers == 3
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: ReadingNote.read(run).readers == 2)
    assert_holds(read(run), 3)


def test_a_note_that_cannot_be_removed_leaves_the_error_of_the_run(run: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with RunLock(run), pytest.raises(CheckpointError, match="another model"), noted_reading(run, find_or_fetch(run)):
        raise CheckpointError("another model")
    assert "read-only" in notices()[f"file {run / '.reading'}"]


def test_instead_of_one_that_was_passed_over_an_older_copy_is_fetched(tmp_path: Path):
    root, remote = tmp_path / "run", RemoteCheckpoints(f"file://{tmp_path}/remote")
    with CheckpointWriter(root, copies=BackgroundCopies(remote)) as writer:
        for step in (1, 2):
            save(writer, step)
    (root / "global_step_1").rename(tmp_path / "elsewhere")
    die_reading(root, 3, remote)
    assert_holds(read(root, remote), 1)
    assert "global_step_1" in notices()[f"checkpoint {root / 'global_step_1'}"]


def test_a_damaged_note_counts_deaths_from_zero_and_is_reported(run: Path):
    die_reading(run, 3)
    (run / ".reading").write_text("{")
    assert_holds(read(run), 3)
    assert "deaths are counted from 0" in notices()[f"file {run / '.reading'}"]
